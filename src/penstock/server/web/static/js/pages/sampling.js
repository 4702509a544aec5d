// The system prompt and sampling of the chat; what is left empty is the model's own.

import { h } from "../dom.js";
import { remember, remembered } from "../storage.js";

/** @typedef {import("../types").Sampling} Sampling */

/** @type {Sampling} */
let options = { system: "", temperature: "", top_p: "", max_tokens: "", seed: "", tools: "", ...remembered("sampling", {}) };

const NUMBERS = /** @type {[keyof Sampling, string, number, number, number | string][]} */ ([
  ["temperature", "Temperature", 0, 2, 0.1],
  ["top_p", "Top p", 0, 1, 0.05],
  ["max_tokens", "Max tokens", 1, 1000000, 1],
  ["seed", "Seed", 0, 2 ** 31, 1],
]);

export const sampling = () => options;

/** @param {HTMLElement} element */
export function setSampling(element) {
  if (!(element instanceof HTMLInputElement || element instanceof HTMLTextAreaElement)) return;
  options = { ...options, [element.name]: element.value };
  remember("sampling", options);
}

export function drawSampling() {
  return h(
    "div",
    { class: "options" },
    h("label", { class: "field" }, h("span", null, "System prompt"), h("textarea", { name: "system", rows: 2, "data-action": "option", placeholder: "none", "data-own": true }, options.system)),
    h(
      "div",
      { class: "fields" },
      NUMBERS.map(([name, label, min, max, step]) => h("label", { class: "field" }, h("span", null, label), h("input", { type: "number", name, min, max, step, value: options[name], placeholder: "default", "data-action": "option", "data-own": true }))),
    ),
    h("details", null, h("summary", null, "Tools"), h("label", { class: "field" }, h("span", null, "OpenAI's `tools`, as JSON; calls are shown, not made"), h("textarea", { name: "tools", rows: 4, "data-action": "option", spellcheck: "false", "data-own": true }, options.tools))),
  );
}

/**
 * The fields of a request.
 * @returns {Record<string, unknown>}
 */
export function fields() {
  /** @type {Record<string, unknown>} */
  const found = {};
  for (const [name] of NUMBERS) if (options[name] !== "") found[name] = Number(options[name]);
  if (options.tools.trim()) found.tools = JSON.parse(options.tools);
  return found;
}
