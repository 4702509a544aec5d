// "Will it fit?": a model's bytes for so much context and so many at once, before it is loaded.

import { h } from "../dom.js";
import { get, Problem } from "../api.js";
import { bytes, count, exactBytes } from "../format.js";
import { stacked } from "../charts.js";
import { value } from "../parts.js";
import { redraw } from "../shell.js";

/** @typedef {import("../types").Plan} Plan */
/** @typedef {{ plan: Plan | null, problem: string, context: number, concurrency: number, asked: number }} Fit */

/** @type {Map<string, Fit>} */
export const fits = new Map();
const STEP = 256;
const MOST_AT_ONCE = 64;

/**
 * Ask for the numbers; the answer to the latest question counts.
 * @param {string} name
 * @param {HTMLElement} [sliders]
 */
export async function askFit(name, sliders) {
  const fit = fits.get(name) ?? { plan: null, problem: "", context: 0, concurrency: 1, asked: 0 };
  fits.set(name, fit);
  const root = sliders?.closest(".fit");
  if (root) {
    fit.context = Number(value(root, "context"));
    fit.concurrency = Number(value(root, "concurrency"));
    redraw();
  }
  fit.asked += 1;
  const asked = fit.asked;
  const wanted = fit.context ? `&context=${fit.context}&concurrency=${fit.concurrency}` : "";
  try {
    const plan = await get(`admin/api/plan?model=${encodeURIComponent(name)}${wanted}`);
    if (asked !== fit.asked) return;
    fit.plan = plan;
    fit.problem = "";
    if (!fit.context) {
      fit.context = plan.window;
      return askFit(name);
    }
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    fit.problem = error.message;
  }
  redraw();
}

/** @param {string} name */
export function drawFit(name) {
  const fit = fits.get(name);
  if (fit?.problem) return h("p", { class: "problem" }, fit.problem);
  const plan = fit?.plan;
  if (!fit || !plan) return h("p", { class: "empty" }, "Reading the model's files.");
  const kv = plan.needed_bytes ?? 0;
  const fixed = plan.fixed_bytes;
  const whole = Math.max(plan.limit_bytes, fixed + kv);
  const room = Math.max(plan.kv_bytes - kv, 0);
  const parts = [
    { key: "fixed", kind: "p-weights", size: fixed, tip: `Weights, process and steps: ${bytes(fixed)}` },
    { key: "kv", kind: plan.fits === false ? "over" : "p-kv", size: kv, tip: `KV for ${count(fit.concurrency)} × ${count(fit.context)} tokens: ${bytes(kv)}\n${exactBytes(kv)}` },
    { key: "room", kind: "free", size: room, tip: `KV that could be had beside it: ${bytes(room)}` },
  ];
  const least = Math.min(STEP, plan.window);
  return h(
    "div",
    { class: "fit" },
    h("h3", null, "Will it fit?"),
    slider(name, "context", "Context", fit.context, least, plan.window, STEP, `${count(fit.context)} tokens`),
    slider(name, "concurrency", "At once", fit.concurrency, 1, MOST_AT_ONCE, 1, `${count(fit.concurrency)} ${fit.concurrency === 1 ? "sequence" : "sequences"}`),
    stacked(parts, whole, `${bytes(fixed + kv)} of ${bytes(plan.limit_bytes)}`, plan.limit_bytes),
    h(
      "p",
      { class: plan.fits === false ? "verdict bad" : "verdict good", role: "status" },
      plan.fits === false ? "Does not fit. " : "Fits. ",
      h("span", { class: "note" }, sentence(plan, fit, kv)),
    ),
  );
}

/** @param {Plan} plan @param {Fit} fit @param {number} kv */
function sentence(plan, fit, kv) {
  const held = `${bytes(plan.fixed_bytes)} for the model in ${plan.dtype} on ${plan.device}, and ${bytes(kv)} of KV; `;
  if (plan.kv_bytes <= 0) return `${held}the model alone leaves no KV within the limit of ${bytes(plan.limit_bytes)}.`;
  const room = `${bytes(plan.kv_bytes)} of KV can be had${plan.loaded ? "" : " if idle models make room"}. `;
  const longest = `At most ${count(plan.concurrency_at_context)} at once at ${count(fit.context)} tokens, or ${count(plan.context_at_concurrency ?? plan.longest_context)} tokens with ${count(fit.concurrency)} at once.`;
  return held + room + longest;
}

/** @param {string} model @param {string} name @param {string} label @param {number} at @param {number} min @param {number} max @param {number} step @param {string} text */
function slider(model, name, label, at, min, max, step, text) {
  const id = `${name}-${model}`;
  return h(
    "div",
    { class: "slider" },
    h("label", { for: id }, label),
    h("input", { type: "range", id, name, min, max, step, value: at, "data-action": "fit", "data-name": model, "aria-valuetext": text }),
    h("output", { for: id }, text),
  );
}
