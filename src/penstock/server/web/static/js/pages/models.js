// Models: on disk and in memory; load, unload, pin; what fits; their settings; making further ones.

import { h } from "../dom.js";
import { get, post, inPath, Problem } from "../api.js";
import { bytes, count, duration, percent, rate, short } from "../format.js";
import { attempt, button, empty, figure, heading, loading, panel } from "../parts.js";
import { changes, names, redraw } from "../shell.js";
import { state } from "../live.js";
import { drawFit, askFit, fits } from "./fit.js";
import { cancel, canQuantize, drawPull, drawQuantize, ended, pull, quantize } from "./making.js";
import { drawSettings, loadSettings, changeSetting, takeBack } from "./settings.js";

/** @typedef {import("../types").Model} Model */
/** @typedef {import("../types").Card} Card */

/** @type {{ cards: Card[], problems: Record<string, string>, loaded: boolean }} */
const catalog = { cards: [], problems: {}, loaded: false };
/** @type {Map<string, string>} what went wrong with a model, as the server said it */
const troubles = new Map();
/** @type {Map<string, string>} what was asked of a model and is not answered yet */
const busy = new Map();
/** What is open below a model. */
const open = { name: "", what: "" };
let made = 0; // models pulled or quantised, when the catalog was last read

/** @type {import("../types").Page} */
export const models = {
  id: "models",
  title: "Models",
  enter: () => loadCatalog(),
  draw() {
    if (ended() !== made) {
      made = ended();
      void loadCatalog();
      void names.load();
    }
    return h(
      "div",
      null,
      heading("Models"),
      changes() ? drawPull() : null,
      catalog.loaded || state.models?.length ? rows().map(drawModel) : empty("Looking on disk."),
      catalog.loaded && rows().length === 0 ? empty("No models on disk yet. Fetch one above: smollm2 is small and needs no account.") : null,
      drawProblems(),
    );
  },
  async act(action, element, event) {
    const name = element.dataset.name ?? "";
    if (action === "toggle") {
      const what = element.dataset.what ?? "";
      const closes = open.name === name && open.what === what;
      Object.assign(open, closes ? { name: "", what: "" } : { name, what });
      redraw();
      if (!closes && what === "fit") await askFit(name);
      if (!closes && what === "settings") await loadSettings();
    } else if (action === "fit") await askFit(name, element);
    else if (action === "setting") await changeSetting(element, event);
    else if (action === "take-back") await takeBack(element);
    else if (action === "load") await work(name, action, { detach: true }); // whoever closes the page may come back
    else if (action === "unload") await work(name, action);
    else if (action === "pin") await work(name, "pin", { pinned: element.dataset.pinned !== "true" });
    else if (action === "pull" && event.type === "submit") await pull(element);
    else if (action === "quantize" && event.type === "submit") await quantize(name, element);
    else if (action === "cancel-task") await cancel(element.dataset.id ?? "");
  },
};

async function loadCatalog() {
  await attempt(async () => {
    const answer = await get("admin/api/catalog");
    catalog.cards = answer.models;
    catalog.problems = answer.problems;
    catalog.loaded = true;
    redraw();
  });
}

function drawProblems() {
  const rows = Object.entries(catalog.problems);
  if (rows.length === 0) return null;
  return panel(
    "Cannot be served",
    `${count(rows.length)} on disk, and why`,
    h("dl", { class: "problems" }, rows.map(([name, problem]) => h("div", { "data-key": name, "data-problem": name }, h("dt", null, name), h("dd", null, problem)))),
  );
}

/** Those in memory first. @returns {{ card: Card | undefined, model: Model }[]} */
function rows() {
  const resident = new Map((state.models ?? []).map((model) => [model.name, model]));
  const found = catalog.cards.map((card) => ({ card, model: resident.get(card.name) ?? absent(card.name) }));
  const known = new Set(catalog.cards.map((card) => card.name));
  const others = [...resident.values()].filter((model) => !known.has(model.name)).map((model) => ({ card: undefined, model }));
  return [...found, ...others].sort((a, b) => Number(a.model.state === "absent") - Number(b.model.state === "absent") || a.model.name.localeCompare(b.model.name));
}

/** @param {string} name @returns {Model} */
const absent = (name) => ({ name, state: "absent" });

/** @param {{ card: Card | undefined, model: Model }} row */
function drawModel({ card, model }) {
  const shown = open.name === model.name ? open.what : "";
  const facts = [card?.architecture, card?.parameters ? `${short(card.parameters)} parameters` : null, model.dtype ?? card?.dtype, model.kv_dtype === "int8" ? "KV in int8" : null, model.device, card?.context ? `${count(card.context)} tokens` : null].filter(Boolean);
  const trouble = troubles.get(model.name) ?? (model.state === "failed" ? (model.reason ?? "The last load failed; Events says why.") : null);
  return h(
    "section",
    { class: `panel model ${model.state}`, "data-key": model.name, "data-model": model.name },
    h(
      "div",
      { class: "model-head" },
      h("div", { class: "model-name" }, h("h2", null, model.name), h("p", { class: "note" }, facts.join(" · "))),
      pill(model),
      h(
        "div",
        { class: "row" },
        changes() ? actions(model, card) : null,
        toggle(model.name, "fit", "Will it fit?", shown),
        toggle(model.name, "settings", "Settings", shown),
        changes() && canQuantize(card) ? toggle(model.name, "quantize", "Quantise", shown) : null,
      ),
    ),
    model.state === "loading" ? loading(model) : null,
    model.state === "ready" || model.state === "draining" ? drawFigures(model) : null,
    model.state === "absent" && card ? h("dl", { class: "figures" }, figure("On disk", bytes(card.stored_bytes ?? card.bytes)), figure("Weights", bytes(card.bytes)), figure("Kind", card.kind), figure("Source", card.source ?? "–", "", "wide")) : null,
    trouble ? h("p", { class: "problem", role: "alert" }, trouble) : null,
    shown ? h("div", { id: `${shown}-${model.name}`, class: "details", "data-key": shown }, drawDetails(model.name, shown, card)) : null,
  );
}

/** @param {string} name @param {string} what @param {Card | undefined} card */
function drawDetails(name, what, card) {
  if (what === "fit") return drawFit(name);
  return what === "quantize" && card ? drawQuantize(card) : drawSettings(name);
}

/** @param {string} name @param {string} what @param {string} label @param {string} shown */
function toggle(name, what, label, shown) {
  const is = shown === what;
  return button("toggle", label, { "data-name": name, "data-what": what, class: is ? "on" : "", "aria-expanded": String(is), "aria-controls": `${what}-${name}`, "aria-label": `${label} ${name}` });
}

/** @param {Model} model */
function pill(model) {
  const words = { absent: "on disk", loading: "loading", ready: "ready", draining: "draining", failed: "failed" };
  const kinds = { absent: "", loading: "busy", ready: "good", draining: "busy", failed: "bad" };
  return h("span", { class: `pill ${kinds[model.state]}`, "data-state": model.state }, model.pinned ? `${words[model.state]}, pinned` : words[model.state]);
}

/** @param {Model} model @param {Card | undefined} card */
function actions(model, card) {
  const asked = busy.get(model.name);
  const name = { "data-name": model.name, disabled: asked !== undefined && model.state !== "loading" };
  const pinned = { ...name, "data-pinned": String(model.pinned ?? false), "aria-pressed": String(model.pinned ?? false) };
  const there = model.state !== "absent" && model.state !== "failed";
  const generates = card === undefined || card.kind === "generate";
  return [
    there
      ? button("unload", model.state === "loading" ? "Cancel" : asked === "unload" ? "Unloading" : "Unload", { ...name, "data-key": "load" })
      : generates
        ? button("load", asked === "load" ? "Loading" : "Load", { ...name, class: "primary", "data-key": "load" })
        : null,
    there ? button("pin", model.pinned ? "Unpin" : "Pin", pinned) : null,
  ];
}

/** @param {Model} model */
function drawFigures(model) {
  const idle = model.leases ? "in use" : duration(model.idle_s);
  const ttl = model.ttl_s ? `unloaded after ${duration(model.ttl_s)} idle` : "stays until others need its memory";
  return h(
    "dl",
    { class: "figures" },
    figure("Holds", bytes(model.bytes), `weights ${bytes(model.weight_bytes)}\nKV ${bytes(model.kv_bytes)}, of that in use ${bytes(model.kv_used_bytes)}\nsteps ${bytes(model.step_bytes)}`),
    figure("Context now", `${count(model.context)}`, "The longest sequence that fits"),
    figure("KV tokens", short(model.kv_tokens), `That there is KV for, of all requests together: ${count(model.kv_tokens)}`),
    figure("Leases", count(model.leases), "Requests and others that keep it from being unloaded"),
    figure("Running", `${count(model.running ?? model.requests)}${model.waiting ? ` + ${model.waiting} waiting` : ""}`),
    figure("Speed", model.tokens_per_s === undefined || model.tokens_per_s === null ? "–" : `${rate(model.tokens_per_s)} tok/s`),
    figure("Cached", percent(model.cached_share), "Of prompt tokens since the load"),
    figure("Idle", idle, ttl),
  );
}

/** @param {string} name @param {"load" | "unload" | "pin"} verb @param {unknown} [body] */
async function work(name, verb, body = {}) {
  troubles.delete(name);
  busy.set(name, verb);
  redraw();
  try {
    await post(`admin/api/models/${inPath(name)}/${verb}`, body);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    troubles.set(name, error.message);
  }
  if (busy.get(name) === verb) busy.delete(name);
  fits.delete(name);
  redraw();
  if (open.name === name && open.what === "fit") await askFit(name);
}
