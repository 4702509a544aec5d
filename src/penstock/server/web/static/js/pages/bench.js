// Bench: many clients of a model at once, how fast it went, and how fast it was before.

import { h } from "../dom.js";
import { post } from "../api.js";
import { count, moment, percent, rate } from "../format.js";
import { attempt, button, empty, figure, heading, panel, progress, table, value } from "../parts.js";
import { bars } from "../charts.js";
import { changes } from "../shell.js";
import { names } from "../shell.js";
import { state } from "../live.js";
import { remember, remembered } from "../storage.js";

/** @typedef {import("../types").Task} Task */
/** @typedef {{ id: string, at: number, result: Record<string, any> }} Run */

const MOST_RUNS = 50;
const FIELDS = [
  ["clients", "Clients", 4, 256],
  ["requests", "Requests", 16, 10000],
  ["input", "Tokens in", 64, 100000],
  ["output", "Tokens out", 32, 10000],
];

/** @type {import("../types").Page} */
export const bench = {
  id: "bench",
  title: "Bench",
  enter: () => names.load(),
  draw() {
    const tasks = state.tasks.filter((task) => task.kind === "bench");
    const runs = keep(tasks);
    const current = tasks.findLast((task) => task.state === "running" || task.state === "failed");
    return h(
      "div",
      null,
      heading("Bench"),
      changes() ? drawForm(tasks.some((task) => task.state === "running")) : null,
      current ? drawCurrent(current) : null,
      runs.length ? drawRuns(runs) : panel("Runs", null, empty("None yet. A run sends requests to the model like any client's, so others wait beside it.")),
    );
  },
  async act(action, element, event) {
    if (action === "bench" && event.type === "submit") await start(element);
    if (action === "cancel-task") await attempt(() => post(`admin/api/tasks/${element.dataset.id}/cancel`));
    if (action === "forget") remember("bench", []);
  },
};

/** @param {HTMLElement} form */
async function start(form) {
  const numbers = Object.fromEntries(FIELDS.map(([name]) => [name, Number(value(form, String(name)))]));
  await attempt(() => post("admin/api/tasks", { kind: "bench", model: value(form, "model"), ...numbers }));
}

/** The server keeps the latest tasks only; runs stay in this browser. @param {Task[]} tasks @returns {Run[]} */
function keep(tasks) {
  /** @type {Run[]} */
  const known = remembered("bench", []);
  const ids = new Set(known.map((run) => run.id));
  const fresh = tasks.filter((task) => task.state === "done" && task.result && !ids.has(`${task.id} ${task.began_at}`));
  if (fresh.length === 0) return known;
  const runs = [...known, ...fresh.map((task) => ({ id: `${task.id} ${task.began_at}`, at: task.began_at, result: task.result ?? {} }))];
  remember("bench", runs.slice(-MOST_RUNS));
  return runs;
}

/** @param {boolean} running */
function drawForm(running) {
  return panel(
    "Run",
    "real requests through the server's own front door",
    h(
      "form",
      { class: "fields", "data-action": "bench" },
      h("label", { class: "field grow" }, h("span", null, "Model"), h("select", { name: "model" }, names.all.map((name) => h("option", { value: name, "data-key": name }, name)))),
      FIELDS.map(([name, label, at, max]) => h("label", { class: "field" }, h("span", null, label), h("input", { type: "number", name, value: at, min: 1, max, required: true, "data-own": true }))),
      h("button", { type: "submit", class: "primary", disabled: running }, running ? "Running" : "Run"),
    ),
  );
}

/** @param {Task} task */
function drawCurrent(task) {
  if (task.error) return h("p", { class: "problem" }, task.error.message);
  if (task.state !== "running") return null;
  return h("section", { class: "panel" }, h("div", { class: "loading" }, h("b", null, task.subject), progress(task.done, task.total, task.phase), h("span", { class: "note" }, `${task.phase}: ${count(task.done)} of ${count(task.total)}`), button("cancel-task", "Cancel", { "data-id": task.id })));
}

/** @param {Run[]} runs */
function drawRuns(runs) {
  const latest = [...runs].reverse();
  const { result } = latest[0];
  const shape = (/** @type {Record<string, any>} */ of) => `${of.clients} × ${of.input_tokens}→${of.output_tokens}`;
  const one = new Set(runs.map((run) => run.result.model)).size === 1;
  const chart = latest.slice(0, 12).map((run) => ({ key: run.id, name: `${moment(run.at)}  ${one ? "" : run.result.model}  ${shape(run.result)}`, value: run.result.output_tokens_per_s, text: `${rate(run.result.output_tokens_per_s)} tok/s` }));
  const spread = (/** @type {Record<string, number>} */ of) => `${rate(of.p50)} / ${rate(of.p90)} / ${rate(of.p99)}`;
  const rows = latest.map((run) => ({ key: run.id, cells: [moment(run.at), run.result.model, shape(run.result), count(run.result.requests), rate(run.result.output_tokens_per_s), spread(run.result.first_token_ms), spread(run.result.between_tokens_ms)] }));
  return h(
    "div",
    null,
    panel(
      "Latest",
      result.model,
      h(
        "dl",
        { class: "figures lead" },
        figure("Tokens/s", rate(result.output_tokens_per_s)),
        figure("First token", `${rate(result.first_token_ms.p50)} ms`, "half of them sooner"),
        figure("Between tokens", `${rate(result.between_tokens_ms.p50)} ms`),
        figure("Device idle", percent(result.device_idle_share)),
        figure("Took", `${result.seconds} s`),
      ),
    ),
    panel("Tokens per second", "the latest runs", bars(chart, "Tokens per second by run")),
    panel("All runs", "in this browser", table("Runs", [["When", ""], ["Model", "wide"], ["Clients × in→out", ""], ["Requests", "n"], ["Tokens/s", "n"], ["First token ms p50 / p90 / p99", "n"], ["Between ms", "n"]], rows)),
    h("p", null, button("forget", "Forget these runs", { class: "quiet" })),
  );
}
