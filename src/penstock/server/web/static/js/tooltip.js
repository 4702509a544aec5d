// Whatever has `data-tip` says it beside the pointer, or beside itself when it has the focus.

import { h } from "./dom.js";

const GAP = 12;
const tip = h("div", { class: "tip", role: "tooltip", hidden: true });

export function installTooltip() {
  document.body.append(tip);
  document.addEventListener("pointermove", (event) => {
    if (event.pointerType !== "touch") show(owner(event), event.clientX, event.clientY);
  });
  document.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch") show(owner(event), event.clientX, event.clientY);
    else tip.hidden = true;
  });
  document.addEventListener("focusin", (event) => {
    const node = owner(event);
    if (node === null || !node.matches(":focus-visible")) return;
    const box = node.getBoundingClientRect();
    show(node, box.left, box.bottom - GAP / 2);
  });
  for (const kind of ["focusout", "scroll", "keydown"]) {
    document.addEventListener(kind, () => (tip.hidden = true), true);
  }
}

/** @param {Event} event */
function owner(event) {
  return event.target instanceof Element ? event.target.closest("[data-tip]") : null;
}

/**
 * @param {Element | null} node
 * @param {number} x
 * @param {number} y
 */
function show(node, x, y) {
  const text = node?.getAttribute("data-tip");
  tip.hidden = !text;
  if (!text) return;
  if (tip.textContent !== text) tip.textContent = text;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(x + GAP, window.innerWidth - width - GAP);
  const below = y + GAP + height < window.innerHeight;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${below ? y + GAP : y - GAP - height}px`;
}
