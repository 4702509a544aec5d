// What every page may use: who is here, the names of the models, and being drawn again.

import { get } from "./api.js";
import { attempt } from "./parts.js";

/** @type {{ now: import("./types").Session | null }} */
export const session = { now: null };

/** Whether this page may change anything of the server. */
export function changes() {
  return session.now?.role === "admin" && session.now.dashboard === "full";
}

const LEAST_MS = 60;
/** @type {() => void} */
let drawAll = () => {};
let asked = false;
let drawn = 0;

/** @param {() => void} draw */
export function onRedraw(draw) {
  drawAll = draw;
}

/** Draw soon; many calls are one drawing. */
export function redraw() {
  if (asked) return;
  asked = true;
  const wait = Math.max(LEAST_MS - (performance.now() - drawn), 0);
  setTimeout(() => {
    asked = false;
    drawn = performance.now();
    drawAll();
  }, wait);
}

export const names = {
  /** @type {string[]} models that generate text */
  all: [],
  async load() {
    await attempt(async () => {
      const { data } = await get("v1/models");
      names.all = data.filter((/** @type {any} */ model) => (model.kind ?? "generate") === "generate").map((/** @type {any} */ model) => model.id);
      redraw();
    });
  },
};
