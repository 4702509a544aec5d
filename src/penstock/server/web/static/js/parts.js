// Pieces that several pages are made of: figures, bars, tables, notices, questions.

import { h, icon, ICONS } from "./dom.js";
import { Problem } from "./api.js";
import { bytes } from "./format.js";

/** @typedef {import("./dom.js").Child} Child */

/**
 * A page's heading.
 * @param {string} title
 * @param {...(Child | Child[])} beside
 */
export function heading(title, ...beside) {
  return h("header", { class: "heading" }, h("h1", null, title), h("div", { class: "beside" }, ...beside));
}

/**
 * @param {string} title
 * @param {Child} note
 * @param {...(Child | Child[])} children
 */
export function panel(title, note, ...children) {
  const head = h("div", { class: "panel-head" }, h("h2", null, title), note && h("span", { class: "note" }, note));
  return h("section", { class: "panel" }, title ? head : null, ...children);
}

/**
 * A figure with its name.
 * @param {string} name
 * @param {Child} value
 * @param {string} [tip]
 * @param {string} [kind] a further class
 */
export function figure(name, value, tip, kind = "") {
  return h("div", { class: `figure ${kind}`.trim(), "data-tip": tip }, h("dt", null, name), h("dd", null, value));
}

/**
 * @param {string} action
 * @param {Child | Child[]} label
 * @param {import("./dom.js").Attributes} [attributes]
 */
export function button(action, label, attributes = {}) {
  return h("button", { type: "button", "data-action": action, ...attributes }, label);
}

/**
 * @param {string} action
 * @param {keyof typeof ICONS} drawing
 * @param {string} label
 * @param {import("./dom.js").Attributes} [attributes]
 */
export function iconButton(action, drawing, label, attributes = {}) {
  const named = { class: "quiet square", "aria-label": label, "data-tip": label };
  return button(action, icon(ICONS[drawing]), { ...named, ...attributes });
}

/**
 * How far something is; without a total it only shows that it goes on.
 * @param {number} done
 * @param {number} total
 * @param {string} label
 */
export function progress(done, total, label) {
  return h("progress", { "aria-label": label, max: total || null, value: total ? done : null });
}

const PHASES = { room: "waiting for memory", weights: "reading the weights", profile: "measuring its steps; later loads are quicker" };

/**
 * How far a model's load is.
 * @param {import("./types").Model | undefined} model
 */
export function loading(model) {
  const step = model?.progress;
  const phase = PHASES[/** @type {keyof typeof PHASES} */ (step?.phase)] ?? step?.phase ?? "starting its process";
  const words = step?.total_bytes ? `${phase}: ${bytes(step.done_bytes)} of ${bytes(step.total_bytes)}` : phase;
  return h("div", { class: "loading", role: "status" }, progress(step?.done_bytes ?? 0, step?.total_bytes ?? 0, "Loading the model"), h("span", { class: "note" }, `Loading the model: ${words}`));
}

/** @param {string} text */
export function empty(text) {
  return h("p", { class: "empty" }, text);
}

/**
 * A table whose cells know their column, for narrow screens.
 * @param {string} caption
 * @param {[string, string][]} columns name and class
 * @param {{ key: string, cells: (Child | Child[])[], class?: string }[]} rows
 */
export function table(caption, columns, rows) {
  const head = columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, name));
  const body = rows.map((row) =>
    h(
      "tr",
      { "data-key": row.key, class: row.class },
      row.cells.map((cell, at) => h("td", { class: columns[at][1], "data-label": columns[at][0] }, cell)),
    ),
  );
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      null,
      h("caption", { class: "unseen" }, caption),
      h("thead", null, h("tr", null, head)),
      h("tbody", null, body),
    ),
  );
}

/**
 * Says something for a while, once; problems stay longer.
 * @param {string} text
 * @param {"good" | "bad"} kind
 */
export function notice(text, kind = "good") {
  for (const old of document.querySelectorAll(".notice")) if (old.textContent === text) old.remove();
  const node = h("div", { class: `notice ${kind}` }, text);
  document.getElementById("notices")?.append(node);
  setTimeout(() => node.remove(), kind === "bad" ? 12000 : 4000);
}

/**
 * Does something and says what failed.
 * @param {() => Promise<unknown>} work
 */
export async function attempt(work) {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    notice(error.message, "bad");
  }
}

/**
 * Asks before something is done that cannot be taken back.
 * @param {string} question
 * @param {string} yes
 * @returns {Promise<boolean>}
 */
export function confirmed(question, yes) {
  return new Promise((answer) => {
    const dialog = /** @type {HTMLDialogElement} */ (
      h(
        "dialog",
        { "aria-label": question },
        h("p", null, question),
        h(
          "div",
          { class: "row end" },
          h("button", { type: "button", value: "no", autofocus: true }, "Cancel"),
          h("button", { type: "button", value: "yes", class: "primary" }, yes),
        ),
      )
    );
    dialog.addEventListener("click", (event) => {
      if (event.target instanceof HTMLButtonElement) dialog.close(event.target.value);
    });
    dialog.addEventListener("close", () => {
      answer(dialog.returnValue === "yes");
      dialog.remove();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/**
 * The text of a field inside an element.
 * @param {Element} root
 * @param {string} name
 */
export function value(root, name) {
  const node = root.querySelector(`[name="${name}"]`);
  const known = node instanceof HTMLInputElement || node instanceof HTMLSelectElement || node instanceof HTMLTextAreaElement;
  return known ? node.value : "";
}
