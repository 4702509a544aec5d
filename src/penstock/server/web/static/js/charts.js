// Drawings of figures: a domain as a stacked bar, and bars to compare. All SVG.

import { h, svg } from "./dom.js";
import { bytes, exactBytes, ownerName } from "./format.js";

/** @typedef {import("./types").Domain} Domain */
/** @typedef {{ size: number, kind: string, tip: string, key: string }} Segment */

export const PURPOSES = [
  "weights", "kv", "step", "graphs", "loading", "tier", "queue", "process", "requests", "grammars", "exiting",
];
const WORDS = {
  weights: "weights", kv: "KV cache", step: "steps", graphs: "CUDA graphs", loading: "loading",
  tier: "KV in RAM", queue: "KV to disk", process: "processes", requests: "requests", grammars: "grammars", exiting: "exiting",
};

/** @param {string} purpose */
export const purposeName = (purpose) => WORDS[/** @type {keyof typeof WORDS} */ (purpose)] ?? purpose;

/**
 * Models first, by size, then the server's own.
 * @param {Domain} domain
 */
export function owners(domain) {
  const rows = Object.entries(domain.owners).map(([owner, held]) => {
    const total = Object.values(held).reduce((sum, size) => sum + size, 0);
    return { owner, held, total, isModel: /^model[: ]/.test(owner) };
  });
  return rows.sort((a, b) => Number(b.isModel) - Number(a.isModel) || b.total - a.total);
}

/**
 * The books, then what is free; up to the capacity also what is beyond the limit, the spare and
 * others' use, and up to the limit only what of it others have taken.
 * @param {Domain} domain
 * @param {boolean} toLimit
 * @returns {Segment[]}
 */
export function segments(domain, toLimit) {
  /** @type {Segment[]} */
  const found = [];
  for (const { owner, held } of owners(domain)) {
    for (const purpose of PURPOSES.filter((name) => held[name])) {
      const size = held[purpose];
      const tip = `${ownerName(owner)}\n${purposeName(purpose)}: ${bytes(size)}\n${exactBytes(size)}`;
      found.push({ size, kind: `p-${purpose}`, tip, key: `${owner} ${purpose}` });
    }
  }
  const free = Math.max(domain.free_bytes, 0);
  const rest = domain.capacity_bytes - domain.booked_bytes - free - domain.spare_bytes - domain.external_bytes;
  const taken = domain.limit_bytes - domain.booked_bytes - free;
  const within = [["free", "Free: can be booked", free], ["external", "Below the limit, but other programs use it", taken]];
  const others = toLimit ? within : [
    ["free", "Free: can be booked", free],
    ["beyond", "Beyond our limit", Math.max(rest, 0)],
    ["spare", "Spare: left to the machine", domain.spare_bytes],
    ["external", "Other programs", domain.external_bytes],
  ];
  for (const [kind, name, size] of /** @type {[string, string, number][]} */ (others)) {
    if (size > 0) found.push({ size, kind, tip: `${name}: ${bytes(size)}\n${exactBytes(size)}`, key: kind });
  }
  return found;
}

/**
 * Pieces of a whole, side by side. Drawn in a box of 1000 by 100 that is stretched.
 * @param {Segment[]} parts
 * @param {number} whole
 * @param {string} label
 * @param {number | null} [mark] a line at this many bytes
 */
export function stacked(parts, whole, label, mark = null) {
  let at = 0;
  const drawn = parts.map(({ size, kind, tip, key }) => {
    const x = (1000 * at) / whole;
    const width = (1000 * size) / whole;
    at += size;
    return svg("rect", { "data-key": key, class: kind, x, y: 0, width: Math.max(width - 0.8, 0.6), height: 100, "data-tip": tip });
  });
  const line = mark === null ? null : svg("rect", { class: "mark", x: Math.min((1000 * mark) / whole, 998), y: 0, width: 2, height: 100 });
  const box = { viewBox: "0 0 1000 100", preserveAspectRatio: "none", class: "stacked", role: "img", "aria-label": label };
  return svg("svg", box, drawn, line);
}

/**
 * Horizontal bars to compare figures of one kind.
 * @param {{ key: string, name: string, value: number, text: string }[]} rows
 * @param {string} label
 * @param {number} [whole] that a full bar stands for; otherwise the largest
 */
export function bars(rows, label, whole) {
  const most = whole ?? Math.max(...rows.map((row) => row.value), 1e-9);
  return h(
    "div",
    { class: "bars", role: "list", "aria-label": label },
    rows.map((row) =>
      h(
        "div",
        { class: "bar", role: "listitem", "data-key": row.key },
        h("span", { class: "bar-name" }, row.name),
        svg(
          "svg",
          { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
          svg("rect", { class: "bar-back", width: 100, height: 10 }),
          svg("rect", { class: "bar-fill", width: (100 * row.value) / most, height: 10 }),
        ),
        h("span", { class: "bar-value" }, row.text),
      ),
    ),
  );
}
