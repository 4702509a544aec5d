// The last 15 minutes of a domain: its bytes as areas and lines, and what happened, a lane for each kind.

import { h, svg } from "./dom.js";
import { bytes, clock, count, field, fieldName } from "./format.js";

/** @typedef {import("./types").Point} Point */
/** @typedef {import("./types").LogEvent} LogEvent */
/** @typedef {{ name: string, flags: Record<string, string> }} Lane each event, and how it is drawn */

const WIDTH = 1000;
const HEIGHT = 200;
const SPAN_S = 900;
const STEP_S = 5;
const NEAR_S = 12; // events of a lane so close to each other are one flag
const MOST_TOLD = 6; // in the words of one flag
/** @type {Lane[]} */
const LANES = [
  { name: "loads", flags: { load: "up", loaded: "up" } },
  { name: "unloads", flags: { unload: "down", "load cancelled": "down" } },
  { name: "pressure", flags: { short: "short", shed: "shed", released: "released" } },
  { name: "refused", flags: { refusal: "bad" } },
  { name: "failed", flags: { "load failed": "bad", death: "bad", hang: "bad", restart: "bad", "circuit opened": "bad" } },
];
/** Drawn about their middle. */
const SHAPES = /** @type {Record<string, string>} */ ({
  up: "M-4 3.5L0 -3.5L4 3.5Z",
  down: "M-4 -3.5L0 3.5L4 -3.5Z",
  short: "M0 -4.5L4.5 0L0 4.5L-4.5 0Z",
  shed: "M-4 -3.5H4L0 4Z",
  released: "M-4 0L-1 3L4 -3.5",
  bad: "M-3.5 -3.5L3.5 3.5M3.5 -3.5L-3.5 3.5",
});
const WORST = ["bad", "shed", "short", "released"];
/** @type {[string, string][]} */
const KEYS = [["up", "load"], ["down", "unload, cancelled load"], ["short", "memory short: admission is held along the bar"], ["shed", "shed"], ["released", "released"], ["bad", "refusal, failure"]];

/**
 * @param {string} name of the domain
 * @param {Point[]} points
 * @param {LogEvent[]} events
 * @param {boolean} toLimit whether the limit fills the drawing, otherwise the capacity
 */
export function timeline(name, points, events, toLimit) {
  const rows = points.filter((point) => point.domains[name]).map((point) => ({ at: point.at, ...point.domains[name] }));
  if (rows.length < 2) return h("p", { class: "empty" }, "The timeline begins with the next readings, one every 5 s.");
  const end = rows[rows.length - 1].at;
  const top = Math.max(...rows.map((row) => (toLimit ? Math.max(row.limit_bytes, row.booked_bytes) : Math.max(row.capacity_bytes, row.booked_bytes + row.external_bytes))));
  const here = events.filter((row) => row.at > end - SPAN_S && row.at <= end + STEP_S && (row.domain ?? name) === name);
  const held = heldOf(rows);
  const lanes = LANES.map((lane) => ({ lane, flags: flagsOf(lane, here), bars: lane.name === "pressure" ? held : [] })).filter(({ flags, bars }) => flags.length || bars.length);
  const used = new Set(lanes.flatMap(({ flags }) => flags.map((flag) => flag.kind)));
  return h(
    "figure",
    { class: "timeline" },
    lanes.flatMap(({ lane, flags, bars }) => [h("span", { class: "lane-name", "data-key": `${lane.name} name` }, lane.name), drawLane(lane, flags, bars, end)]),
    h("div", { class: "scale", "aria-hidden": "true" }, [1, 0.5, 0].map((share) => h("span", null, bytes(share * top)))),
    h("div", { class: "plot" }, drawPlot(name, rows, end, top, toLimit)),
    h("div", { class: "hours", "aria-hidden": "true" }, [15, 10, 5, 0].map((ago) => h("span", null, ago ? `−${ago} min` : clock(end)))),
    used.size ? h("ul", { class: "flag-keys", "aria-hidden": "true" }, KEYS.filter(([kind]) => used.has(kind)).map(([kind, words]) => h("li", { "data-key": kind }, svg("svg", { viewBox: "-6 -6 12 12", class: `flag ${kind}` }, svg("path", { d: SHAPES[kind] })), words))) : null,
  );
}

/**
 * @param {string} name
 * @param {({ at: number } & Point["domains"][string])[]} rows
 * @param {number} end
 * @param {number} top
 * @param {boolean} toLimit
 */
function drawPlot(name, rows, end, top, toLimit) {
  /** @param {number} at */
  const x = (at) => WIDTH * share(at, end);
  /** @param {number} size */
  const y = (size) => HEIGHT * (1 - size / top);
  /** @param {(row: typeof rows[number]) => number} of @param {typeof rows} [some] */
  const line = (of, some = rows) => some.map((row) => `${x(row.at).toFixed(1)},${y(of(row)).toFixed(1)}`).join(" ");
  const left = x(rows[0].at).toFixed(1);
  const read = line((row) => row.read_bytes ?? 0, rows.filter((row) => row.read_bytes !== null && row.read_bytes !== undefined));
  const width = (WIDTH * STEP_S) / SPAN_S;
  return svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `Memory of ${name} over the last 15 minutes` },
    toLimit ? null : svg("polygon", { class: "external", points: `${left},0 ${line((row) => row.capacity_bytes - row.external_bytes)} ${WIDTH},0` }),
    svg("polygon", { class: "booked", points: `${left},${HEIGHT} ${line((row) => row.booked_bytes)} ${WIDTH},${HEIGHT}` }),
    svg("polyline", { class: "limit", points: line((row) => row.limit_bytes) }),
    read ? svg("polyline", { class: "read", points: read }) : null,
    rows.map((row) => svg("rect", { class: "column", x: x(row.at) - width / 2, y: 0, width, height: HEIGHT, "data-tip": pointTip(row) })),
  );
}

/** Where a moment is, from 0 at the left to 1. @param {number} at @param {number} end */
const share = (at, end) => Math.min(Math.max(1 - (end - at) / SPAN_S, 0), 1);

/** @param {number} part */
const percentage = (part) => `${(100 * part).toFixed(2)}%`;

/**
 * The events of a lane, those close to each other together: the worst of them says how it is drawn.
 * @param {Lane} lane
 * @param {LogEvent[]} events
 */
function flagsOf(lane, events) {
  /** @type {{ kind: string, rows: LogEvent[] }[]} */
  const flags = [];
  for (const row of events.filter(({ event }) => event in lane.flags).sort((a, b) => a.at - b.at)) {
    const kind = lane.flags[row.event];
    const last = flags.at(-1);
    if (last === undefined || row.at - last.rows[0].at > NEAR_S) flags.push({ kind, rows: [row] });
    else {
      last.rows.push(row);
      if (WORST.indexOf(kind) < WORST.indexOf(last.kind)) last.kind = kind;
    }
  }
  return flags;
}

/** From when to when admission was held. @param {{ at: number, short: boolean }[]} rows */
function heldOf(rows) {
  /** @type {[number, number][]} */
  const spans = [];
  for (const { at, short } of rows) {
    const last = spans.at(-1);
    if (short && last && at - last[1] < 1.5 * STEP_S) last[1] = at;
    else if (short) spans.push([at - STEP_S, at]);
  }
  return spans;
}

/** @param {Lane} lane @param {ReturnType<typeof flagsOf>} flags @param {[number, number][]} bars @param {number} end */
function drawLane(lane, flags, bars, end) {
  const said = (/** @type {{ rows: LogEvent[] }} */ { rows }) => `${clock(rows[0].at)} ${[...new Set(rows.map(({ event }) => event))].join(", ")}`;
  return svg(
    "svg",
    { class: "lane", role: "img", "aria-label": `${lane.name}: ${flags.map(said).join("; ")}`, "data-key": lane.name, "data-lane": lane.name },
    bars.map(([from, to]) => svg("rect", { "data-key": `held ${from}`, class: "held", x: percentage(share(from, end)), y: 4, width: percentage(share(to, end) - share(from, end)), height: 8, rx: 2, "data-tip": `${clock(from)} to ${clock(to)}  admission held` })),
    flags.map(({ kind, rows }) =>
      svg(
        "svg",
        { x: percentage(share(rows[0].at, end)), y: 8, class: `flag ${kind}`, "data-key": rows[0].at, "data-tip": tellAll(rows) },
        svg("rect", { class: "target", x: -8, y: -8, width: 16, height: 16 }),
        svg("path", { d: SHAPES[kind] }),
      ),
    ),
  );
}

/** @param {LogEvent[]} rows */
function tellAll(rows) {
  const more = rows.length - MOST_TOLD;
  return [...rows.slice(0, MOST_TOLD).map(tell), ...(more > 0 ? [`and ${count(more)} more: see Events`] : [])].join("\n");
}

const TOLD = ["model", "reason", "code", "message", "act", "before_bytes", "after_bytes", "booked_bytes", "external_bytes"];

/** @param {LogEvent} row */
function tell(row) {
  const details = TOLD.filter((name) => row[name] !== null && row[name] !== undefined).map((name) => (name === "model" ? String(row.model) : `${fieldName(name)} ${field(name, row[name])}`));
  return [`${clock(row.at)}  ${row.event}`, ...details].join(", ");
}

/** @param {{ at: number } & Point["domains"][string]} row */
function pointTip(row) {
  const lines = [clock(row.at), `booked ${bytes(row.booked_bytes)} of ${bytes(row.limit_bytes)}`];
  if (row.read_bytes !== null && row.read_bytes !== undefined) lines.push(`read ${bytes(row.read_bytes)}`);
  lines.push(`others ${bytes(row.external_bytes)}`, `free ${bytes(row.free_bytes)}`);
  if (row.short) lines.push("short: admission held");
  return lines.join("\n");
}
