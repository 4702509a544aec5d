// The frame of the page: navigation, theme, signing in and out, and which page is shown.

import { actor, h, icon, ICONS, morphChildren } from "./dom.js";
import { access, call, get, Problem } from "./api.js";
import { clock } from "./format.js";
import { onChange, onClosed, reconnect, start, state, stop } from "./live.js";
import { drawNav, showMore, toggleMore } from "./nav.js";
import { attempt, button, confirmed, value } from "./parts.js";
import { installTooltip } from "./tooltip.js";
import { names, onRedraw, redraw, session } from "./shell.js";
import { memory } from "./pages/memory.js";
import { models } from "./pages/models.js";
import { requests } from "./pages/requests.js";
import { chat } from "./pages/chat.js";
import { cache } from "./pages/cache.js";
import { bench } from "./pages/bench.js";
import { events } from "./pages/events.js";
import { settingsPage } from "./pages/settings.js";

/** @typedef {import("./types").Page} Page */

const ALL = [chat, memory, models, requests, cache, bench, events, settingsPage];
const app = /** @type {HTMLElement} */ (document.getElementById("app"));
/** @type {Page | null} */
let page = null;
let refused = "";
let ended = ""; // the key whose session is over
const AGAIN_MS = 3000;

/** Clients without the right to administer have the chat. */
function pages() {
  return session.now?.role === "admin" ? ALL : [chat];
}

let checking = false; // a key, which takes a second if it is wrong
let moved = false; // to another page, since it was last drawn

function route() {
  const wanted = /^#\/([a-z]+)/.exec(location.hash)?.[1] ?? "";
  const found = pages().find(({ id }) => id === wanted) ?? pages()[0];
  if (found === page) return;
  moved = page !== null;
  showMore(false, false);
  page?.leave?.();
  page = found;
  document.title = `${found.title} · Penstock`;
  scrollTo(0, 0);
  redraw();
  void found.enter?.();
}

async function begin() {
  try {
    const before = session.now;
    session.now = await get("web/session");
    if (before?.role && !session.now?.role) ended = before.key ?? "";
    if (before === null) refused = "";
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (session.now === null) {
      refused = error.message;
      setTimeout(begin, AGAIN_MS);
    }
    return redraw(); // what was known stays; the stream says when the server is back
  }
  if (session.now?.role === "admin") start();
  else stop();
  if (session.now?.role) {
    route();
    void names.load();
  } else {
    page?.leave?.();
    page = null;
  }
  redraw();
}

function draw() {
  const shown = session.now?.role ? drawFrame(session.now) : drawSignIn();
  morphChildren(app, [shown]);
  if (page) page.settle?.(app);
  if (moved) document.getElementById("main")?.focus({ preventScroll: true }); // where reading begins
  moved = false;
}

/** @param {import("./types").Session} who */
function drawFrame(who) {
  const admin = who.role === "admin";
  const signOut = `Sign out${who.key ? ` (${keyName(who.key)})` : ""}`;
  return h(
    "div",
    { class: "frame", "data-key": "frame", "data-page": page?.id },
    h(
      "nav",
      { class: "side", "aria-label": "Pages" },
      h("a", { class: "brand", href: `#/${pages()[0].id}` }, mark(), h("span", null, "Penstock")),
      drawNav(pages(), page),
      h(
        "div",
        { class: "foot" },
        admin ? h("span", { class: state.connected ? "live on" : "live", role: "status", "data-tip": state.connected ? "The figures are live" : "The server's stream is interrupted" }, state.connected ? "live" : "connecting") : null,
        who.dashboard === "read-only" && admin ? h("span", { class: "pill", "data-tip": "server.dashboard is read-only: this page changes nothing" }, "read-only") : null,
        h("button", { type: "button", class: "quiet square", "data-action": "theme", "aria-label": "Light or dark", "data-tip": "Light or dark" }, icon(ICONS.theme)),
        who.needs_key ? h("button", { type: "button", class: "quiet square", "data-action": "sign-out", "aria-label": signOut, "data-tip": signOut }, icon(ICONS.signout)) : null,
        h("span", { class: "version" }, who.version),
      ),
    ),
    h("main", { id: "main", tabindex: -1, "aria-label": page?.title }, drawLost(), page ? h("div", { class: `page ${page.id}`, "data-key": page.id }, page.draw()) : null),
  );
}

/** @param {string} key as the server calls it */
const keyName = (key) => (key === "admin" ? "an admin key" : `API ${key}`);

/** What to do when the server has gone. */
function drawLost() {
  if (state.lostAt === null) return null;
  return h(
    "div",
    { class: "problem lost", role: "alert", "data-key": "lost" },
    h("p", null, h("b", null, `No answer from ${location.host} since ${clock(state.lostAt)}. `), "What this page shows is of that time. It connects again by itself as soon as the server answers."),
    h("p", null, "See whether ", h("code", null, "penstock serve"), " still runs on that machine, and what it said last; from elsewhere, also whether the network or the tunnel to it is up."),
    button("reconnect", "Try now"),
  );
}

const mark = () => h("img", { src: "web/icon.svg", alt: "", width: 26, height: 26 });

function drawSignIn() {
  if (session.now === null) {
    const words = refused ? `${refused} Trying again every ${AGAIN_MS / 1000} s; see whether penstock serve still runs.` : "";
    return h("main", { id: "main", class: "signin", "data-key": "wait" }, h("p", { class: "empty", role: "status" }, words));
  }
  return h(
    "main",
    { id: "main", class: "signin", "data-key": "signin" },
    h(
      "form",
      { class: "panel", "data-action": "sign-in" },
      h("div", { class: "brand" }, mark(), h("span", null, "Penstock")),
      h("h1", null, "Sign in"),
      ended && !refused ? h("p", { class: "note", role: "status" }, `The session of ${keyName(ended)} has ended; the same key, or another, opens a new one.`) : null,
      h("label", { for: "key" }, "Key"),
      h("input", { id: "key", name: "key", type: "password", autocomplete: "current-password", required: true, autofocus: true, "aria-describedby": "signin-note", "aria-invalid": refused ? "true" : null }),
      refused ? h("p", { class: "problem", role: "alert" }, refused) : null,
      h("button", { type: "submit", class: "primary", disabled: checking }, checking ? "Checking the key" : "Sign in"),
      h("p", { class: "note", id: "signin-note" }, "An admin key (server.admin_keys) shows everything; an API key opens the chat. The key is exchanged for a cookie that scripts cannot read."),
    ),
  );
}

/** @param {string} action @param {HTMLElement} element @param {Event} event */
async function act(action, element, event) {
  if (action === "theme") return toggleTheme();
  if (action === "sign-in") return event.type === "submit" ? signIn(element) : undefined;
  if (action === "sign-out") return attempt(signOut);
  if (action === "copy-code") return copyCode(element);
  if (action === "more") return toggleMore();
  if (action === "reconnect") return reconnect();
  await page?.act?.(action, element, event);
}

/** @param {HTMLElement} form */
async function signIn(form) {
  if (checking) return;
  refused = "";
  checking = true;
  redraw();
  try {
    await call("POST", "web/session", { key: value(form, "key") });
    if (form instanceof HTMLFormElement) form.reset();
    ended = "";
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    refused = error.message;
  }
  checking = false;
  await begin();
}

async function signOut() {
  const lost = ALL.map((one) => one.unfinished?.() ?? "").find(Boolean);
  if (lost && !(await confirmed(`${lost} Sign out anyway?`, "Sign out"))) return;
  await call("DELETE", "web/session");
  stop();
  location.reload(); // nothing that was shown stays in memory
}

function toggleTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("penstock.theme", next);
  } catch {
    // It holds until the page is left.
  }
}

/** @param {HTMLElement} element */
async function copyCode(element) {
  await navigator.clipboard?.writeText(element.closest(".code")?.querySelector("code")?.textContent ?? "");
}

/** @param {Event} event */
function heard(event) {
  const element = actor(event);
  if (element === null) return;
  const field = element.matches("input, select, textarea");
  const form = element instanceof HTMLFormElement;
  if (form !== (event.type === "submit") || (event.type === "click") === (field || form)) return;
  if (form) event.preventDefault();
  void act(element.dataset.action ?? "", element, event);
}

document.querySelector(".skip")?.addEventListener("click", (event) => {
  event.preventDefault(); // the address names the page
  document.getElementById("main")?.focus();
});

for (const kind of ["click", "input", "change", "submit"]) document.addEventListener(kind, heard);

document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof Element && event.target.matches("input, select, textarea");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !session.now?.role) return;
  const wanted = pages()[Number(event.key) - 1];
  if (wanted) location.hash = `#/${wanted.id}`;
  if (event.key === "/") {
    const field = document.querySelector("#search, #prompt");
    if (field instanceof HTMLElement) field.focus();
    event.preventDefault();
  }
});

access.lost = onClosed.listener = () => {
  if (session.now?.role) void begin();
};
onRedraw(draw);
onChange(redraw);
window.addEventListener("hashchange", route);
installTooltip();
void begin();
