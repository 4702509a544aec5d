// Memory: per domain the bounds, the books by owner and purpose, what was read, the last 15 minutes.

import { h, svg } from "../dom.js";
import { bytes, count, exactBytes, ownerName, percent } from "../format.js";
import { heading, panel, figure, empty } from "../parts.js";
import { PURPOSES, owners, purposeName, segments, stacked } from "../charts.js";
import { timeline } from "../timeline.js";
import { redraw } from "../shell.js";
import { state } from "../live.js";

/** @typedef {import("../types").Domain} Domain */

const SMALL = 0.5; // share of the capacity below which a limit fills the drawings, so that its parts are seen
let exact = false; // whether the books show every digit
/** @type {boolean | null} whether drawings show the machine's capacity; null: by the limit */
let whole = null;

/** @type {import("../types").Page} */
export const memory = {
  id: "memory",
  title: "Memory",
  draw() {
    const rows = state.memory;
    if (rows === null) return h("div", null, heading("Memory"), empty("Waiting for the first reading."));
    const domains = Object.entries(rows.domains);
    return h(
      "div",
      { "data-at": rows.at, "data-models-at": state.modelsAt },
      heading("Memory"),
      domains.map(([name, domain]) => drawDomain(name, domain)),
      h(
        "section",
        { class: "panel" },
        h(
          "dl",
          { class: "figures" },
          figure("Connections", `${count(rows.connections.open)} of ${count(rows.connections.most)}`, `${bytes(rows.connections.held_bytes)} held, ${count(rows.connections.refused)} refused`),
          figure("Requests hold", bytes(rows.requests.used_bytes), exactBytes(rows.requests.used_bytes)),
          figure("Wait for room", count(rows.requests.waiting)),
          figure("Drift reserve", bytes(sum(Object.values(rows.drift_reserve))), "By how much processes exceeded their estimates"),
        ),
      ),
    );
  },
  act(action, element) {
    if (action === "exact" && element instanceof HTMLInputElement) exact = element.checked;
    if (action === "whole" && element instanceof HTMLInputElement) whole = element.checked;
    redraw();
  },
};

/** @param {number[]} sizes */
const sum = (sizes) => sizes.reduce((total, size) => total + size, 0);

/** @param {string} name @param {Domain} domain */
function drawDomain(name, domain) {
  const machine = whole ?? domain.limit_bytes >= SMALL * domain.capacity_bytes;
  const parts = segments(domain, !machine);
  const most = Math.max(sum(parts.map((part) => part.size)), machine ? domain.capacity_bytes : domain.limit_bytes, 1);
  const label = `${name}: ${bytes(domain.booked_bytes)} booked of a limit of ${bytes(domain.limit_bytes)}, ${bytes(domain.free_bytes)} free, other programs ${bytes(domain.external_bytes)}`;
  const state_ = domain.short ? h("span", { class: "pill bad" }, "short: admission is held") : h("span", { class: "pill good", "data-tip": "Other programs leave what is booked" }, "not short");
  return h(
    "div",
    { class: "domain", "data-key": name, "data-domain": name },
    h(
      "section",
      { class: "panel" },
      h("div", { class: "panel-head" }, h("h2", null, name === "ram" ? "RAM" : name.toUpperCase()), state_, h("label", { class: "check push", "data-tip": "Draw the bars and the timeline up to the machine's capacity, otherwise up to the limit" }, h("input", { type: "checkbox", "data-action": "whole", checked: machine }), "Whole machine")),
      h(
        "dl",
        { class: "figures lead" },
        bounded("Booked", domain.booked_bytes, `${percent(domain.booked_bytes / domain.limit_bytes)} of the limit`),
        bounded("Free", domain.free_bytes, "can be booked now"),
        domain.purposes.kv ? bounded("KV in use", usedKv(domain), `of ${bytes(domain.purposes.kv)}; the rest gives way`, "kv-used") : null,
        bounded("Limit", domain.limit_bytes, "ours"),
        bounded("Others", domain.external_bytes, "other programs"),
        bounded("Spare", domain.spare_bytes, "left to the machine"),
        bounded("Capacity", domain.capacity_bytes, "of the machine"),
      ),
      h("div", { class: "bar-label" }, h("span", null, "Booked"), h("span", { class: "note" }, `by owner and purpose; ${machine ? "the line is the limit" : "the whole bar is the limit"}`)),
      stacked(parts, most, label, machine || domain.booked_bytes > domain.limit_bytes ? domain.limit_bytes : null),
      drawRead(domain, most, machine),
      drawLegend(domain, machine),
    ),
    panel("Last 15 minutes", legend15(machine), timeline(name, state.timeline, [...state.events, ...refusals()], !machine)),
    h(
      "section",
      { class: "panel" },
      h("div", { class: "panel-head" }, h("h2", null, "The books"), h("span", { class: "note" }, "bytes promised, by owner and purpose"), h("label", { class: "check push" }, h("input", { type: "checkbox", "data-action": "exact", checked: exact }), "Every byte")),
      drawBooks(domain),
    ),
  );
}

/** What requests hold of the KV that is booked. @param {Domain} domain */
function usedKv(domain) {
  const here = (state.models ?? []).filter(({ name }) => domain.owners[`model:${name}`]?.kv);
  return sum(here.map((model) => model.kv_used_bytes ?? 0));
}

/** @param {string} name @param {number} size @param {string} note @param {string} [of] what the bytes are */
function bounded(name, size, note, of = name.toLowerCase()) {
  return h("div", { class: "figure", "data-tip": exactBytes(size), "data-of": of, "data-bytes": size }, h("dt", null, name), h("dd", null, bytes(size)), h("dd", { class: "note" }, note));
}

/** What was read of our processes, and of others, at the scale of the books. @param {Domain} domain @param {number} most @param {boolean} machine */
function drawRead(domain, most, machine) {
  const read = domain.read_bytes;
  if (read === null || read === undefined) return null;
  const external = machine ? domain.external_bytes : 0;
  const gap = most - read - external;
  const parts = [
    { size: read, kind: "read", tip: `Read of our processes: ${bytes(read)}\n${exactBytes(read)}`, key: "read" },
    { size: Math.max(gap, 0), kind: "nothing", tip: "Not in use", key: "gap" },
    { size: external, kind: "external", tip: `Other programs: ${bytes(external)}`, key: "external" },
  ].filter(({ size }) => size > 0);
  const held = `${bytes(read)} of our processes; the rest is promised and not yet used, or weights mapped from files`;
  return h(
    "div",
    { class: "reading", "data-of": "read", "data-bytes": read },
    h("div", { class: "bar-label" }, h("span", null, "Read"), h("span", { class: "note" }, held)),
    stacked(parts, most, `Read: ${bytes(read)}`),
  );
}

/** @param {Domain} domain @param {boolean} machine */
function drawLegend(domain, machine) {
  const used = PURPOSES.filter((purpose) => domain.purposes[purpose]);
  const taken = domain.limit_bytes - domain.booked_bytes - Math.max(domain.free_bytes, 0);
  const item = (/** @type {string} */ kind, /** @type {string} */ name, /** @type {number} */ size) =>
    h("li", { "data-key": kind, "data-tip": exactBytes(size) }, swatch(kind), h("span", null, name), h("b", null, bytes(size)));
  return h(
    "ul",
    { class: "legend" },
    used.map((purpose) => item(`p-${purpose}`, purposeName(purpose), domain.purposes[purpose])),
    item("free", "free", Math.max(domain.free_bytes, 0)),
    machine ? item("spare", "spare", domain.spare_bytes) : null,
    machine ? item("external", "others", domain.external_bytes) : taken > 0 ? item("external", "others below the limit", taken) : null,
  );
}

/** @param {string} kind */
const swatch = (kind) => svg("svg", { viewBox: "0 0 10 10", class: "swatch", "aria-hidden": "true" }, svg("rect", { class: kind, width: 10, height: 10, rx: 2 }));

/** @param {boolean} machine */
function legend15(machine) {
  const item = (/** @type {string} */ kind, /** @type {string} */ name) => h("span", { class: `key ${kind}` }, name);
  return h("span", { class: "keys" }, item("k-booked", "booked"), item("k-read", "read"), item("k-limit", "limit"), machine ? item("k-external", "others") : null);
}

function refusals() {
  return state.refusals.map((row) => ({ at: row.at, event: "refusal", model: row.model, code: row.code, message: row.message }));
}

/** @param {Domain} domain */
function drawBooks(domain) {
  const used = PURPOSES.filter((purpose) => domain.purposes[purpose]);
  const rows = owners(domain);
  const shown = exact ? count : bytes;
  const cell = (/** @type {number | undefined} */ size, /** @type {string} */ kind, /** @type {string} */ label) =>
    size ? h("td", { class: `n ${kind}`, "data-label": label, "data-bytes": size, "data-tip": exactBytes(size) }, shown(size)) : h("td", { class: "n none" }, "·");
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "books" },
      h("caption", { class: "unseen" }, "Booked bytes by owner and purpose"),
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Owner"), used.map((name) => h("th", { scope: "col", class: "n" }, purposeName(name))), h("th", { scope: "col", class: "n" }, "Sum"))),
      h(
        "tbody",
        null,
        rows.map(({ owner, held, total, isModel }) =>
          h("tr", { "data-key": owner }, h("th", { scope: "row" }, isModel ? ownerName(owner) : h("span", { class: "muted" }, owner)), used.map((purpose) => cell(held[purpose], "part", purposeName(purpose))), cell(total, "sum", "Sum")),
        ),
      ),
      h("tfoot", null, h("tr", null, h("th", { scope: "row" }, "All"), used.map((purpose) => cell(domain.purposes[purpose], "purpose", purposeName(purpose))), cell(domain.booked_bytes, "booked", "Sum"))),
    ),
  );
}
