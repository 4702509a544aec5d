// Settings with their values and origins; those that may be changed while the server runs, are so here.

import { h } from "../dom.js";
import { call, get } from "../api.js";
import { sizeText } from "../format.js";
import { attempt, button, empty, heading, notice, panel } from "../parts.js";
import { changes, redraw } from "../shell.js";

/** @typedef {import("../types").Setting} Setting */

/** @type {Setting[] | null} */
let settings = null;
let words = "";
let onlySet = false;
const OVERRIDDEN = "admin API"; // the origin of what was changed here
const SECTIONS = /** @type {[string, string, string][]} */ ([
  ["server", "Server", "the HTTP side"],
  ["memory", "Memory", "how much may be used"],
  ["cache", "Cache", "KV kept beyond a request"],
  ["models", "Models", "all of them; Models has the settings of each"],
]);
const HOLDS = { now: "", reload: "from the model's next load", restart: "after a restart" };

/** @type {import("../types").Page} */
export const settingsPage = {
  id: "settings",
  title: "Settings",
  enter: () => loadSettings(),
  draw() {
    const all = (settings ?? []).filter(({ key }) => !/^models\..*\./.test(key));
    const rows = all.filter((row) => (!onlySet || row.origin !== "default") && matches(row));
    return h(
      "div",
      null,
      heading("Settings", changes() && h("button", { type: "button", "data-action": "reload", "data-tip": "Read penstock.toml again, as SIGHUP does" }, "Read the file again")),
      h(
        "div",
        { class: "row filters" },
        h("input", { type: "search", id: "search", placeholder: "Search", "aria-label": "Search settings", "data-action": "search", autocomplete: "off" }),
        h("label", { class: "check" }, h("input", { type: "checkbox", "data-action": "only-set", checked: onlySet }), "Only what is set"),
        h("span", { class: "note", role: "status" }, `${rows.length} of ${all.length}`),
      ),
      h("p", { class: "note lines" }, "Changes made here hold until the server ends; write them into penstock.toml to keep them."),
      settings === null ? empty("Reading the settings.") : drawSections(rows),
    );
  },
  async act(action, element, event) {
    if (action === "search" && element instanceof HTMLInputElement) words = element.value.toLowerCase();
    else if (action === "only-set" && element instanceof HTMLInputElement) onlySet = element.checked;
    else if (action === "setting") await changeSetting(element, event);
    else if (action === "take-back") await takeBack(element);
    else if (action === "reload") await attempt(reread);
    redraw();
  },
};

/** @param {Setting} row */
const matches = (row) => words.split(/\s+/).every((word) => `${row.key} ${row.about}`.toLowerCase().includes(word));

/** @param {Setting[]} rows */
function drawSections(rows) {
  const section = (/** @type {Setting} */ row) => row.key.split(".")[0];
  const found = SECTIONS.map(([id, title, about]) => {
    const own = rows.filter((row) => section(row) === id || (id === "server" && row.key === "home"));
    return own.length ? panel(title, about, drawRows(own, (row) => row.key)) : null;
  });
  return h("div", null, rows.length ? found : empty("None matches."));
}

export async function loadSettings() {
  await attempt(async () => {
    settings = (await get("admin/api/settings")).settings;
    redraw();
  });
}

/** A model's own value stands before that of all models. @param {string} model @returns {Setting[]} */
function settingsOf(model) {
  const own = new Map();
  const before = `models.${model}.`;
  for (const row of settings ?? []) {
    if (!row.per_model) continue;
    if (row.key.startsWith(before)) own.set(row.key.slice(before.length), row);
    else if (/^models\.[a-z_0-9]+$/.test(row.key) && !own.has(row.key.slice(7))) own.set(row.key.slice(7), row);
  }
  return [...own.values()];
}

/** @param {string} model */
export function drawSettings(model) {
  const rows = settingsOf(model);
  if (rows.length === 0) return empty("Reading the settings.");
  const set = rows.filter((row) => row.origin !== "default").length;
  return h(
    "div",
    { class: "settings" },
    h("h3", null, `Settings of ${model}`),
    h("p", { class: "note" }, `${set ? `${set} of ${rows.length} are set` : "All are the defaults"}. A change here is for this model, until the server ends.`),
    drawRows(rows, (row) => `models.${model}.${shortKey(row)}`),
  );
}

/** @param {Setting} row */
const shortKey = (row) => row.key.slice(row.key.lastIndexOf(".") + 1);

/** @param {Setting[]} rows @param {(row: Setting) => string} keyOf what a change of the row sets */
function drawRows(rows, keyOf) {
  return h("div", { class: "setting-list" }, rows.map((row) => drawSetting(row, keyOf(row))));
}

/** @param {Setting} row @param {string} key */
function drawSetting(row, key) {
  const id = `set-${key}`;
  const editable = changes() && row.changeable;
  const holds = row.changeable || row.holds === "restart" ? HOLDS[row.holds] : "in the file only";
  const taken = row.origin === OVERRIDDEN && row.key === key;
  return h(
    "div",
    { class: "setting", "data-key": key },
    h("label", { for: id }, shortKey(row)),
    h("div", { class: "setting-value" }, editable ? field(row, key, id) : h("output", { id, class: "fixed" }, text(row) || "none"), editable && taken ? button("take-back", "Undo", { class: "small", "data-setting": key, "aria-label": `Undo the change of ${key}` }) : null),
    h(
      "div",
      { class: "note", id: `${id}-about` },
      h("span", null, row.about),
      row.origin === "default" ? null : h("span", { class: "tag on" }, row.origin === OVERRIDDEN ? "changed here" : row.origin),
      holds ? h("span", { class: "tag" }, holds) : null,
    ),
  );
}

/** @param {Setting} row @param {string} key @param {string} id */
function field(row, key, id) {
  const attributes = { id, "data-action": "setting", "data-setting": key, "aria-describedby": `${id}-about` };
  const value = text(row);
  if (row.choices.length) return h("select", { ...attributes, "data-value": value }, row.choices.map((choice) => h("option", { value: choice, selected: choice === value }, choice)));
  return h("input", { ...attributes, value, placeholder: "none", spellcheck: "false", autocomplete: "off" });
}

/** A value as it may be written. @param {Setting} row */
function text({ key, value, unit }) {
  if (value === null) return "";
  // A limit is text, as it may be a percentage as well: a size is then its digits.
  if (unit === "bytes" && /^\d+$/.test(String(value))) return sizeText(Number(value));
  if (Array.isArray(value)) return value.join(", ");
  if (typeof value === "object") return JSON.stringify(value);
  return typeof value === "number" && (unit === "s" || key.endsWith("_s")) ? `${value} s` : String(value);
}

/** @param {HTMLElement} element @param {Event} event */
export async function changeSetting(element, event) {
  if (event.type !== "change" || !(element instanceof HTMLInputElement || element instanceof HTMLSelectElement)) return;
  const key = element.dataset.setting ?? "";
  const typed = element.value.trim().replace(/^([\d.]+) s$/, "$1");
  await put(key, typed === "" ? null : typed);
}

/** @param {HTMLElement} element */
export async function takeBack(element) {
  await put(element.dataset.setting ?? "", null);
}

/** @param {string} key @param {string | null} value */
async function put(key, value) {
  await attempt(async () => {
    const answer = await call("PATCH", "admin/api/settings", { settings: { [key]: value } });
    const waits = Object.keys(answer.reload).length ? "; it holds when the model is loaded again" : answer.restart.length ? "; it holds after a restart" : "";
    notice(`${key} ${value === null ? "is as before" : "is changed"}${waits}.`);
  });
  await loadSettings();
}

export async function reread() {
  const { applied, reload, restart } = await call("POST", "admin/api/reload");
  const waits = [...Object.keys(reload).map((name) => `${name} is loaded again`), ...restart.map((/** @type {string} */ key) => `${key} after a restart`)];
  notice([`${applied.length} settings changed`, ...waits].join("; "));
  await loadSettings();
}
