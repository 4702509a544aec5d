// Navigation: all pages at the side; on phones the first few at the bottom, the others behind "More".

import { h, icon, ICONS } from "./dom.js";
import { redraw } from "./shell.js";
import { state } from "./live.js";

/** @typedef {import("./types").Page} Page */

const AT_BOTTOM = 4;
const STEPS = /** @type {Record<string, number>} */ ({ ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 });
let open = false;

/** @param {Page[]} pages @param {Page | null} current */
export function drawNav(pages, current) {
  const [first, rest] = [pages.slice(0, AT_BOTTOM), pages.slice(AT_BOTTOM)];
  const inside = rest.includes(/** @type {Page} */ (current));
  return h(
    "ul",
    { class: "pages" },
    first.map((one, at) => item(one, at, current)),
    rest.length
      ? h(
          "li",
          { class: open ? "rest open" : "rest", "data-key": "rest" },
          h("button", { type: "button", id: "more", class: inside ? "more here" : "more", "data-action": "more", "aria-expanded": String(open), "aria-controls": "more-pages" }, icon(ICONS.more), h("span", null, "More")),
          h("ul", { id: "more-pages", "aria-label": "More pages" }, rest.map((one, at) => item(one, AT_BOTTOM + at, current))),
        )
      : null,
  );
}

/** @param {Page} one @param {number} at @param {Page | null} current */
function item(one, at, current) {
  const waiting = one.id === "requests" ? (state.requests?.waiting ?? 0) : 0;
  const drawing = ICONS[/** @type {keyof typeof ICONS} */ (one.id)];
  return h(
    "li",
    { "data-key": one.id },
    h("a", { href: `#/${one.id}`, "aria-current": one === current ? "page" : null, "aria-keyshortcuts": String(at + 1) }, icon(drawing), h("span", null, one.title), waiting ? h("b", { class: "badge", "aria-label": `${waiting} wait` }, String(waiting)) : null),
  );
}

/** @param {boolean} shown @param {boolean} [focus] whether the focus goes with it */
export function showMore(shown, focus = true) {
  if (shown === open) return;
  open = shown;
  redraw();
  if (!focus) return;
  const target = shown ? "#more-pages a" : "#more";
  setTimeout(() => /** @type {HTMLElement | null} */ (document.querySelector(target))?.focus(), 100);
}

export const toggleMore = () => showMore(!open);

/** The keys of an open menu. @param {KeyboardEvent} event */
function steer(event) {
  if (!open) return;
  if (event.key === "Escape") return showMore(false);
  const links = /** @type {HTMLElement[]} */ ([...document.querySelectorAll("#more-pages a")]);
  const at = links.indexOf(/** @type {HTMLElement} */ (document.activeElement));
  const step = STEPS[event.key];
  const next = step ? (at + step + links.length) % links.length : event.key === "Home" ? 0 : event.key === "End" ? links.length - 1 : -1;
  if (next < 0) return;
  event.preventDefault();
  links[next].focus();
}

document.addEventListener("keydown", steer);
document.addEventListener("pointerdown", (event) => {
  if (event.target instanceof Element && !event.target.closest(".rest")) showMore(false, false);
});
document.addEventListener("focusout", (event) => {
  const to = event.relatedTarget;
  const left = event.target instanceof Element && event.target.closest(".rest") !== null;
  if (left && to instanceof Element && to.closest(".rest") === null) showMore(false, false);
});
