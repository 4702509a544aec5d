// Events: what happened to models and memory, searched and followed.

import { h } from "../dom.js";
import { field, fieldName, moment } from "../format.js";
import { empty, heading } from "../parts.js";
import { redraw } from "../shell.js";
import { state } from "../live.js";

/** @typedef {import("../types").LogEvent} LogEvent */

const BAD = /fail|death|hang|short|shed|opened|refus|not stored/;
const SHOWN = 300;
let kind = "";
let words = "";
let follow = true;
/** @type {LogEvent[]} what is shown while the list is held */
let held = [];

/** @type {import("../types").Page} */
export const events = {
  id: "events",
  title: "Events",
  draw() {
    const all = follow ? state.events : held;
    const kinds = [...new Set(all.map((row) => row.event))].sort();
    const rows = all.filter((row) => (!kind || row.event === kind) && matches(row)).slice(-SHOWN).reverse();
    return h(
      "div",
      null,
      heading("Events", h("label", { class: "check" }, h("input", { type: "checkbox", "data-action": "follow", checked: follow }), "Follow")),
      h(
        "div",
        { class: "row filters" },
        h("input", { type: "search", id: "search", placeholder: "Search", "aria-label": "Search events", "data-action": "search", autocomplete: "off" }),
        h("select", { "data-action": "kind", "aria-label": "Kind of event" }, h("option", { value: "", "data-key": "" }, "All kinds"), kinds.map((name) => h("option", { value: name, "data-key": name, selected: name === kind }, name))),
        h("span", { class: "note", role: "status" }, `${rows.length} of ${all.length}`),
      ),
      rows.length ? h("ol", { class: "event-list", reversed: true }, rows.map(drawEvent)) : empty(all.length ? "None matches." : "Nothing has happened yet."),
    );
  },
  act(action, element, event) {
    if (action === "search" && element instanceof HTMLInputElement) words = element.value.toLowerCase();
    if (action === "kind" && element instanceof HTMLSelectElement) kind = element.value;
    if (action === "follow" && event.type === "change" && element instanceof HTMLInputElement) {
      follow = element.checked;
      held = [...state.events];
    }
    redraw();
  },
};

/** @param {LogEvent} row */
const matches = (row) => words.split(/\s+/).every((word) => JSON.stringify(row).toLowerCase().includes(word));

/** Objects inside a row become fields of it. @param {Record<string, unknown>} row @returns {[string, unknown][]} */
const flat = (row) =>
  Object.entries(row).flatMap(([name, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value)
      ? flat(/** @type {Record<string, unknown>} */ (value)).map(([inner, one]) => /** @type {[string, unknown]} */ ([name === "phases" ? `${inner}_s` : `${name} ${inner}`, one]))
      : [/** @type {[string, unknown]} */ ([name, value])],
  );

/** @param {LogEvent} row */
function drawEvent(row) {
  const fields = flat(row).filter(([name, value]) => name !== "at" && name !== "event" && name !== "model" && value !== null);
  return h(
    "li",
    { "data-key": `${row.at} ${row.event} ${row.model ?? ""}` },
    h("time", { datetime: new Date(row.at * 1000).toISOString() }, moment(row.at)),
    h("span", { class: BAD.test(row.event) ? "kind bad" : "kind" }, row.event),
    h("span", { class: "what" }, row.model ? h("b", null, String(row.model)) : null, fields.map(([name, value]) => h("span", { class: "pair" }, h("i", null, fieldName(name)), ` ${field(name, value)}`))),
  );
}
