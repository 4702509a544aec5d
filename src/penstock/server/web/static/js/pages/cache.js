// Cache: what of the prompts was found, and the KV that is kept in RAM and on disk.

import { h } from "../dom.js";
import { get, post } from "../api.js";
import { bytes, count, exactBytes, moment, percent } from "../format.js";
import { attempt, button, confirmed, empty, figure, heading, panel, progress, table } from "../parts.js";
import { stacked, bars } from "../charts.js";
import { changes, redraw } from "../shell.js";
import { state } from "../live.js";

/** @typedef {import("../types").CacheFigures} CacheFigures */
/** @typedef {import("../types").Task} Task */

const LOOK_MS = 5000;
/** @type {CacheFigures | null} */
let figures = null;
let timer = 0;

/** @type {import("../types").Page} */
export const cache = {
  id: "cache",
  title: "Cache",
  async enter() {
    await load();
    timer = window.setInterval(() => !document.hidden && state.connected && load(), LOOK_MS);
  },
  leave: () => clearInterval(timer),
  draw() {
    const tasks = state.tasks.filter((task) => task.kind.startsWith("cache-"));
    const running = tasks.some((task) => task.state === "running");
    const acts = [button("verify", "Verify", { disabled: running }), button("clear", "Clear", { disabled: running })];
    return h("div", null, heading("Cache", changes() ? acts : null), figures === null ? empty("Reading the figures.") : drawAll(figures), tasks.slice(-3).reverse().map(drawTask));
  },
  async act(action, element) {
    if (action === "verify") await attempt(() => post("admin/api/tasks", { kind: "cache-verify" }));
    if (action === "clear" && (await confirmed("Remove all KV that is kept on disk? Prompts are then computed again.", "Clear"))) {
      await attempt(() => post("admin/api/tasks", { kind: "cache-clear" }));
    }
    if (action === "cancel-task") await attempt(() => post(`admin/api/tasks/${element.dataset.id}/cancel`));
  },
};

async function load() {
  await attempt(async () => {
    figures = await get("admin/api/cache");
    redraw();
  });
}

/** @param {CacheFigures} cache */
function drawAll(cache) {
  const loaded = Object.entries(cache.loaded);
  const shares = loaded.map(([model, of]) => {
    const share = of.prompt_tokens ? of.reused_tokens / of.prompt_tokens : 0;
    return { key: model, name: model, value: share, text: `${percent(share)} of ${count(of.prompt_tokens)}` };
  });
  return h(
    "div",
    null,
    panel("Prompt tokens found in the cache", "since each model's load", shares.length ? bars(shares, "Hit rate by model", 1) : empty("No model is loaded.")),
    loaded.map(([model, of]) => drawTiers(model, of)),
    drawDisk(cache),
  );
}

/** @param {string} model @param {CacheFigures["loaded"][string]} of */
function drawTiers(model, of) {
  const tier = of.tier;
  const shown = Object.entries(tier).filter(([name]) => !["held_bytes", "quota_bytes"].includes(name));
  const asked = (tier.hits ?? 0) + (tier.misses ?? 0);
  return h(
    "section",
    { class: "panel", "data-key": `tiers ${model}` },
    h("div", { class: "panel-head" }, h("h2", null, model)),
    h(
      "dl",
      { class: "figures" },
      figure("Reused", count(of.reused_tokens), "tokens of prompts"),
      figure("Evicted", count(of.evictions), "blocks"),
      tier.ram_hits === undefined ? null : figure("In RAM", `${bytes(tier.ram_bytes)}`, `${count(tier.ram_hits)} hits, ${count(tier.ram_evictions)} evicted`),
      figure("Disk hits", count(tier.hits ?? 0), asked ? `${percent((tier.hits ?? 0) / asked)} of ${count(asked)} asked` : ""),
      figure("Saved", bytes(tier.saved_bytes ?? 0), `${count(tier.saved ?? 0)} blocks`),
      figure("Onloaded", bytes(tier.onloaded_bytes ?? 0)),
    ),
    h("details", null, h("summary", null, `All ${shown.length} figures`), h("dl", { class: "figures small" }, shown.map(([name, size]) => figure(name.replaceAll("_", " "), name.endsWith("bytes") ? bytes(size) : count(Math.round(size * 100) / 100))))),
  );
}

/** @param {CacheFigures} cache */
function drawDisk(cache) {
  const quota = Math.max(cache.quota_bytes, cache.held_bytes, 1);
  const parts = [
    ...cache.models.map((row) => ({ key: row.id, kind: "p-kv", size: row.bytes, tip: `${row.model ?? row.id}: ${bytes(row.bytes)}\n${exactBytes(row.bytes)}` })),
    { key: "free", kind: "free", size: Math.max(quota - cache.held_bytes, 0), tip: `Left of the quota: ${bytes(quota - cache.held_bytes)}` },
  ];
  const rows = cache.models.map((row) => ({ key: row.id, cells: [row.model ?? h("span", { class: "muted" }, row.id), count(row.files), bytes(row.bytes), row.last_used === null ? "–" : moment(Date.parse(row.last_used) / 1000)] }));
  return panel(
    "On disk",
    h("span", { "data-tip": cache.dir }, "what the next start finds again"),
    h("dl", { class: "figures" }, figure("Held", bytes(cache.held_bytes), exactBytes(cache.held_bytes)), figure("Quota", bytes(cache.quota_bytes)), figure("Free on disk", bytes(cache.free_bytes)), cache.other_files ? figure("Other files", `${count(cache.other_files)}, ${bytes(cache.other_bytes)}`) : null),
    stacked(parts, quota, `${bytes(cache.held_bytes)} of ${bytes(cache.quota_bytes)}`),
    rows.length ? table("KV on disk by model", [["Model", "wide"], ["Files", "n"], ["Bytes", "n"], ["Last used", "n"]], rows) : empty("Nothing is kept yet."),
  );
}

/** @param {Task} task */
function drawTask(task) {
  const words = { "cache-verify": "Verify", "cache-clear": "Clear", pull: "Fetch", quantize: "Quantise", bench: "Bench" };
  const bad = Object.entries(task.result?.bad ?? {});
  const done = task.result ? `${count(task.result.files)} files, ${bytes(task.result.bytes)}${task.kind === "cache-verify" ? `, ${bad.length} bad` : ""}` : task.phase;
  return h(
    "section",
    { class: "panel", "data-key": task.id },
    h("div", { class: "panel-head" }, h("h2", null, words[task.kind]), h("span", { class: `pill ${task.state === "done" ? "good" : task.state === "running" ? "busy" : "bad"}` }, task.state)),
    task.state === "running" ? h("div", { class: "loading" }, progress(task.done, task.total, task.phase), button("cancel-task", "Cancel", { "data-id": task.id })) : null,
    h("p", { class: task.error ? "problem" : "note" }, task.error?.message ?? done),
    bad.map(([file, problem]) => h("p", { class: "problem", "data-key": file }, `${file}: ${problem}`)),
  );
}
