// The server's event stream, and the state that it gives. Every page draws from here.

import { get } from "./api.js";

/** @typedef {import("./types").State} State */

const MOST_EVENTS = 512;
const MOST_REFUSALS = 256;
const TIMELINE_S = 900;
const LOST_MS = 3000; // a connection that is back sooner is not worth a word
const HIDDEN_MS = 5000; // a page that nobody sees lets its connection go after this
const KINDS = ["memory", "models", "requests", "tasks", "event", "refusal", "timeline"];

/** @type {State} */
export const state = {
  connected: false,
  lostAt: null,
  memory: null,
  models: null,
  modelsAt: 0,
  requests: null,
  tasks: [],
  events: [],
  refusals: [],
  timeline: [],
};

/** @type {() => void} */
let changed = () => {};
/** @type {EventSource | null} */
let source = null;
let lastId = "";
let failures = 0;
let timer = 0;
let lostTimer = 0;
let lostSince = 0;
let wanted = false;
/** Hears that the server has ended the stream or refused it. */
export const onClosed = { listener: () => {} };

/** @param {() => void} listener */
export function onChange(listener) {
  changed = listener;
}

export function start() {
  if (wanted) return;
  wanted = true;
  connect();
}

export function stop() {
  wanted = false;
  found();
  disconnect();
}

/** Without waiting for the next attempt. */
export function reconnect() {
  failures = 0;
  connect();
}

function disconnect() {
  clearTimeout(timer);
  source?.close();
  source = null;
  state.connected = false;
}

function connect() {
  disconnect();
  if (!wanted) return;
  loadTimeline();
  const since = lastId ? `?since=${encodeURIComponent(lastId)}` : "";
  source = new EventSource(`admin/api/stream${since}`);
  source.onopen = () => {
    failures = 0;
    state.connected = true;
    found();
    changed();
  };
  source.onerror = () => {
    state.connected = false;
    lose();
    changed();
    if (source?.readyState !== EventSource.CLOSED) return; // the browser tries again itself
    onClosed.listener();
    failures += 1;
    timer = window.setTimeout(connect, Math.min(1000 * 2 ** failures, 30000));
  };
  for (const kind of KINDS) {
    source.addEventListener(kind, (row) => {
      const again = Number(row.lastEventId) <= Number(lastId) && (kind === "event" || kind === "refusal");
      if (Number(row.lastEventId) > Number(lastId)) lastId = row.lastEventId;
      if (again) return; // a connection that was made anew repeats some
      take(kind, JSON.parse(row.data));
      changed();
    });
  }
}

function lose() {
  if (lostSince) return;
  lostSince = Date.now();
  lostTimer = window.setTimeout(() => {
    state.lostAt = lostSince / 1000;
    changed();
  }, LOST_MS);
}

function found() {
  clearTimeout(lostTimer);
  lostSince = 0;
  state.lostAt = null;
}

/**
 * @param {string} kind
 * @param {any} row
 */
export function take(kind, row) {
  switch (kind) {
    case "memory":
    case "requests":
      state[kind] = row;
      break;
    case "models":
      state.models = row.models;
      state.modelsAt = row.at;
      break;
    case "tasks":
      state.tasks = row.tasks;
      break;
    case "event":
      add(state.events, row, MOST_EVENTS);
      break;
    case "refusal":
      add(state.refusals, row, MOST_REFUSALS);
      break;
    case "timeline":
      if ((state.timeline.at(-1)?.at ?? 0) < row.at) state.timeline.push(row);
      while (state.timeline.length && state.timeline[0].at < row.at - TIMELINE_S) state.timeline.shift();
      break;
  }
}

/**
 * @template Row
 * @param {Row[]} rows
 * @param {Row} row
 * @param {number} most
 */
function add(rows, row, most) {
  rows.push(row);
  if (rows.length > most) rows.splice(0, rows.length - most);
}

async function loadTimeline() {
  try {
    const { points } = await get("admin/api/timeline");
    const latest = points.at(-1)?.at ?? 0;
    state.timeline = [...points, ...state.timeline.filter((point) => point.at > latest)];
    changed();
  } catch {
    // The stream's own points will do.
  }
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!wanted) return;
  if (document.hidden) timer = window.setTimeout(disconnect, HIDDEN_MS);
  else if (source === null) connect();
});
