// Requests: who runs, who waits and for what; the last refusals, with what would have fitted.

import { h } from "../dom.js";
import { post } from "../api.js";
import { bytes, count, duration, field, fieldName, moment, percent, rate } from "../format.js";
import { attempt, empty, figure, heading, iconButton, panel, table } from "../parts.js";
import { changes } from "../shell.js";
import { state } from "../live.js";

/** @typedef {import("../types").LiveRequest} LiveRequest */
/** @typedef {import("../types").Refusal} Refusal */

const SHOWN_REFUSALS = 50;
const NEVER = 507; // what does not fit now will not in a while either
const ALIKE = /** @type {(keyof Refusal)[]} */ (["model", "code", "message", "route", "key"]);
/** Each state: what the table calls it, and what it means. @type {Record<string, [string, string]>} */
const STATES = {
  checked: ["at the door", "its prompt is counted, and checked against what fits"],
  model: ["waits for the model", "its model is being loaded, or waits for memory to be loaded into"],
  memory: ["waits for memory", "its model is there, and other requests hold the KV that it needs"],
  turn: ["waits for a turn", "it may begin, and the model takes no further request into its batch yet"],
  running: ["running", "it is in the model's batch: its prompt is read or its answer written"],
};

/** @type {import("../types").Page} */
export const requests = {
  id: "requests",
  title: "Requests",
  draw() {
    const live = state.requests;
    const rows = live?.requests ?? [];
    const early = Object.entries(state.memory?.requests.for_tokenizer ?? {});
    const speed = rows.reduce((sum, row) => sum + (row.tokens_per_s ?? 0), 0);
    return h(
      "div",
      null,
      heading("Requests"),
      h(
        "section",
        { class: "panel" },
        h(
          "dl",
          { class: "figures lead" },
          figure("In hand", count(live?.total ?? 0)),
          figure("Waiting", count((live?.waiting ?? 0) + early.reduce((sum, [, waiting]) => sum + waiting, 0))),
          figure("Tokens/s", rate(speed), "Over the requests that are shown"),
          figure("KV", bytes(rows.reduce((sum, row) => sum + row.kv_bytes, 0)), "Of their tokens so far"),
          figure("Refused lately", count(state.refusals.length)),
        ),
      ),
      panel("In hand", rows.length < (live?.total ?? 0) ? `the first ${rows.length}` : null, rows.length ? drawTable(rows) : early.length ? null : empty("Nobody asks for anything at the moment."), early.map(drawEarly), drawStates()),
      panel("Refused", "for lack of room, the latest first", drawRefusals()),
    );
  },
  async act(action, element) {
    if (action === "cancel") await attempt(() => post(`admin/api/requests/${encodeURIComponent(element.dataset.id ?? "")}/cancel`));
  },
};

/** @param {LiveRequest[]} rows */
function drawTable(rows) {
  const named = rows.some((row) => row.key !== "loopback");  // without keys: by address
  /** @type {[string, string][]} */
  const columns = [["State", ""], ["Model", "wide"], ["In", "n"], ["Cached", "n"], ["Out", "n breaks"], ["Rate", "n"], ["First token", "n"], ["KV", "n"], ["Held", "n"], ["Preempted", "n"], ["Age", "n"]];
  if (named) columns.splice(2, 0, ["Client", "client-name"]);
  if (changes()) columns.push(["", "end"]);
  return table("Requests in hand", columns, rows.map((row) => ({ key: row.id, cells: cellsOf(row, named) })));
}

/** @param {LiveRequest} row */
const stateOf = (row) => STATES[row.state === "queued" ? (row.waits_for ?? "model") : row.state] ?? [row.state, ""];

/** @param {LiveRequest} row */
function stateTip(row) {
  const [, meaning] = stateOf(row);
  const before = (row.place ?? 1) - 1;
  const line = row.place === null ? "" : `\nNo. ${row.place} in the line of ${row.model}: ${before ? `${count(before)} go${before === 1 ? "es" : ""} before it` : "it is next"}.`;
  const start = row.expected_start_s === null ? "" : `\nExpected to start in ${duration(row.expected_start_s)}, as fast as the last ones went.`;
  return `${meaning[0].toUpperCase()}${meaning.slice(1)}.${line}${start}`;
}

/** @param {LiveRequest} row @param {boolean} named */
function cellsOf(row, named) {
  const kind = row.state === "running" ? "good" : "busy";
  const place = row.place === null ? "" : `No. ${row.place}`;
  const start = row.expected_start_s === null ? "" : `starts in ${duration(row.expected_start_s)}`;
  const line = [place, start].filter(Boolean).join(", ");
  const cells = [
    h("span", { class: "state", tabindex: 0, "data-tip": stateTip(row) }, h("span", { class: `pill ${kind}` }, stateOf(row)[0]), line ? h("span", { class: "note" }, ` ${line}`) : null),
    h("span", { "data-tip": `${row.id}\npriority ${row.priority}, ${row.answers} ${row.answers === 1 ? "answer" : "answers"}` }, row.model),
    ...(named ? [row.key] : []),
    count(row.prompt_tokens),
    row.cached_tokens === null ? "–" : percent(row.prompt_tokens ? row.cached_tokens / row.prompt_tokens : 0),
    row.max_tokens === null ? count(row.completion_tokens) : `${count(row.completion_tokens)} /\u00a0${count(row.max_tokens)}`,
    row.tokens_per_s === null ? "–" : `${rate(row.tokens_per_s)}/s`,
    duration(row.first_token_s),
    bytes(row.kv_bytes),
    bytes(row.bytes),
    count(row.preemptions),
    duration(row.age_s),
  ];
  const cancel = iconButton("cancel", "close", "Cancel", { "data-id": row.id, "aria-label": `Cancel ${row.id}` });
  return changes() ? [...cells, cancel] : cells;
}

/** Requests whose prompts are not counted yet. @param {[string, number]} row */
function drawEarly([model, waiting]) {
  return h("p", { class: "note early", role: "status", "data-key": model }, h("span", { class: "pill busy" }, waiting === 1 ? "1 waits" : `${count(waiting)} wait`), ` for the tokenizer of ${model}, which is read once there is memory for it; they are listed once their prompts are counted.`);
}

function drawStates() {
  const rows = [...Object.values(STATES), ["No. 3", "its place in the line of its model: two go before it"], ["preempted", "how often its KV was given to others and it went back into the line"]];
  return h("details", { class: "states" }, h("summary", null, "What the states mean"), h("dl", null, rows.map(([name, meaning]) => h("div", { "data-key": name }, h("dt", null, name), h("dd", null, `${meaning}.`)))));
}

function drawRefusals() {
  /** @type {{ latest: Refusal, times: number, since: number }[]} those alike in a row are one */
  const groups = [];
  for (const row of state.refusals.toReversed()) {
    const last = groups.at(-1);
    if (last && ALIKE.every((name) => last.latest[name] === row[name])) {
      last.times += 1;
      last.since = row.at;
    } else groups.push({ latest: row, times: 1, since: row.at });
  }
  if (groups.length === 0) return empty("None. A request that cannot fit is refused before its first byte, and shows up here with the numbers.");
  return h("ul", { class: "refusals" }, groups.slice(0, SHOWN_REFUSALS).map(drawRefusal));
}

/** @param {{ latest: Refusal, times: number, since: number }} group */
function drawRefusal({ latest: row, times, since }) {
  const numbers = Object.entries(row.numbers ?? {}).filter(([, value]) => value !== null && typeof value !== "object");
  const fit = [row.fits?.tokens ? `${count(row.fits.tokens)} tokens` : null, row.fits?.bytes ? bytes(row.fits.bytes) : null].filter(Boolean).join(", ");
  return h(
    "li",
    { "data-key": `${since} ${row.code}` },
    h("div", { class: "row" }, h("time", null, moment(row.at)), h("span", { class: "pill bad" }, `${row.status} ${row.code}`), h("b", null, row.model ?? ""), h("span", { class: "note" }, row.route), times > 1 ? h("span", { class: "note" }, `${count(times)} times since ${moment(since)}`) : null, row.key ? h("span", { class: "note" }, row.key) : null),
    h("p", null, row.message),
    h("dl", { class: "figures small" }, numbers.map(([name, value]) => figure(fieldName(name), field(name, value))), fit ? figure("would have fitted", fit) : null, row.retry_after_s && row.status !== NEVER ? figure("try again in", duration(row.retry_after_s)) : null),
  );
}
