// The conversations of this browser: the latest hundred, in its own storage.

import { remember, remembered } from "../storage.js";

/** @typedef {import("../types").Conversation} Conversation */

const MOST = 100;
/** @type {Conversation[]} the latest first */
let all = remembered("conversations", []);
let currentId = all[0]?.id ?? "";

export const chats = () => all;

/** The one that is open. */
export const conversation = () => all.find(({ id }) => id === currentId);

/** @param {string} id */
export function open(id) {
  currentId = id;
}

/**
 * @param {string} model
 * @param {string} text the first question
 * @returns {Conversation}
 */
export function create(model, text) {
  const title = text.length > 60 ? `${text.slice(0, 57)}…` : text;
  // Outside of secure contexts there is no randomUUID.
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
  const made = { id, title, model, updated: Date.now(), messages: [] };
  all = [made, ...all].slice(0, MOST);
  currentId = id;
  return made;
}

/** Whether it could be kept. @param {Conversation} changed */
export function save(changed) {
  changed.updated = Date.now();
  all = [...all].sort((a, b) => b.updated - a.updated);
  return remember("conversations", all);
}

/** @param {string} id */
export function drop(id) {
  all = all.filter((one) => one.id !== id);
  if (currentId === id) currentId = "";
  remember("conversations", all);
}
