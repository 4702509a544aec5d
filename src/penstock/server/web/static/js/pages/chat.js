// Chat: conversations with a model, as any client of the API has them. They stay in this browser.

import { h, icon, ICONS, morphChildren } from "../dom.js";
import { count, duration, field, fieldName, percent, rate } from "../format.js";
import { button, confirmed, figure, iconButton, loading, notice } from "../parts.js";
import { markdown } from "../markdown.js";
import { names, redraw, session } from "../shell.js";
import { state } from "../live.js";
import { answer, spoken } from "./answering.js";
import { chats, conversation, create, drop, open, save } from "./conversations.js";
import { drawSampling, sampling, setSampling } from "./sampling.js";

/** @typedef {import("../types").Message} Message */

/** @type {{ stop: AbortController | null, editing: number, list: boolean, options: boolean, said: string[] }} */
const view = { stop: null, editing: -1, list: false, options: false, said: [] };
let model = "";
let atEnd = true;
/** @type {WeakMap<Element, string>} what a message's body shows */
const shown = new WeakMap();

/** @type {import("../types").Page} */
export const chat = {
  id: "chat",
  title: "Chat",
  enter() {
    atEnd = true;
    void names.load();
  },
  draw() {
    const current = conversation();
    const messages = current?.messages ?? [];
    return h(
      "div",
      { class: `talk ${view.list ? "with-list" : ""} ${view.options ? "with-options" : ""}` },
      drawList(),
      h(
        "section",
        { class: "thread", "aria-label": "Conversation" },
        drawHead(),
        view.options ? drawSampling() : null,
        h("div", { class: "messages", role: "group", tabindex: 0, "aria-label": "Messages", "data-key": "messages" }, messages.length ? messages.map((message, at) => drawMessage(message, at, messages)) : drawWelcome()),
        h("div", { class: "unseen", role: "log", "aria-live": "polite", "aria-label": "Spoken answer", "data-key": "said" }, view.said.map((sentence) => h("p", null, sentence))),
        drawComposer(),
      ),
    );
  },
  settle(root) {
    const messages = conversation()?.messages ?? [];
    for (const body of root.querySelectorAll("[data-body]")) {
      const message = messages[Number(body.getAttribute("data-body"))];
      if (!message || shown.get(body) === message.content) continue;
      shown.set(body, message.content);
      morphChildren(body, markdown(message.content));
    }
    const list = root.querySelector(".messages");
    if (list && atEnd) list.scrollTop = list.scrollHeight;
  },
  unfinished() {
    const prompt = document.getElementById("prompt");
    if (view.stop) return "An answer is being written and would be cut off.";
    if (prompt instanceof HTMLTextAreaElement && prompt.value.trim()) return "A message is written and not sent.";
    return view.editing >= 0 ? "A message is being edited." : "";
  },
  async act(action, element, event) {
    const at = Number(element.dataset.at ?? -1);
    if (action === "model" && element instanceof HTMLSelectElement) choose(element.value);
    else if (action === "option") setSampling(element);
    else if (action === "prompt" || action === "edited") return;
    else if (action === "send" && event.type === "submit") await send();
    else if (action === "save-edit" && event.type === "submit") await saveEdit(at, element);
    else if (action === "hint" && !view.stop) await ask(element.textContent ?? "");
    else if (action === "stop") view.stop?.abort();
    else if (action === "again") await again(at);
    else if (action === "edit") view.editing = at;
    else if (action === "cancel-edit") view.editing = -1;
    else if (action === "copy") await copy(at);
    else if (action === "new") begin();
    else if (action === "open") openOne(element.dataset.id ?? "");
    else if (action === "drop") drop(element.dataset.id ?? "");
    else if (action === "drop-all" && (await confirmed("Delete all conversations of this browser?", "Delete"))) chats().forEach(({ id }) => drop(id));
    else if (action === "list") showList(!view.list);
    else if (action === "options") view.options = !view.options;
    redraw();
  },
};

/** The model that is asked: the conversation's, otherwise the last chosen, the default or the first. */
function asked() {
  const wanted = [conversation()?.model, model, session.now?.default_model].find((name) => name && (names.all.length === 0 || names.all.includes(name)));
  return wanted || names.all[0] || "";
}

/** @param {string} name */
function choose(name) {
  model = name;
  const current = conversation();
  if (current) current.model = name;
}

function begin() {
  view.stop?.abort();
  open("");
  view.list = false;
  view.editing = -1;
  document.getElementById("prompt")?.focus();
}

/** On narrow screens the list lies over the conversation; it takes the focus and gives it back. @param {boolean} shown */
function showList(shown) {
  view.list = shown;
  redraw();
  const target = shown ? ".talks button" : ".talk-head button";
  setTimeout(() => /** @type {HTMLElement | null} */ (document.querySelector(target))?.focus(), 100);
}

/** @param {string} id */
function openOne(id) {
  view.stop?.abort();
  open(id);
  view.list = false;
  view.editing = -1;
  atEnd = true;
}

function drawHead() {
  const choice = asked();
  return h(
    "header",
    { class: "talk-head" },
    iconButton("list", "list", "Conversations", { class: "quiet square only-narrow", "aria-expanded": String(view.list) }),
    h("h1", { class: "unseen" }, "Chat"),
    h("label", { class: "unseen", for: "chat-model" }, "Model"),
    h("select", { id: "chat-model", "data-action": "model", "data-value": choice, class: "plain" }, names.all.map((name) => h("option", { value: name, "data-key": name, selected: name === choice }, name))),
    h("span", { class: "grow" }),
    iconButton("options", "sliders", "System prompt and sampling", { class: `quiet square ${view.options ? "on" : ""}`, "aria-expanded": String(view.options) }),
    iconButton("new", "plus", "New conversation"),
  );
}

function drawList() {
  const rows = chats();
  const id = conversation()?.id;
  return h(
    "aside",
    { class: "talks", "aria-label": "Conversations" },
    h("div", { class: "row" }, h("h2", { class: "grow" }, "Conversations"), iconButton("list", "close", "Close the list", { class: "quiet square only-narrow" })),
    h("ul", null, rows.map((row) => h("li", { "data-key": row.id, class: row.id === id ? "on" : "" }, button("open", row.title, { "data-id": row.id, class: "quiet", "aria-current": row.id === id ? "true" : null }), iconButton("drop", "close", `Delete ${row.title}`, { "data-id": row.id })))),
    rows.length ? button("drop-all", "Delete all", { class: "quiet small" }) : h("p", { class: "note" }, "They stay in this browser."),
  );
}

function drawWelcome() {
  const hints = ["What is a penstock?", "Write a haiku about memory.", "Show a Python function that reverses a list."];
  const name = asked();
  return h(
    "div",
    { class: "welcome" },
    h("h2", null, "What would you like to ask?"),
    h("p", { class: "note" }, name ? `${name} answers on this server; nothing leaves it.` : "There is no model yet. Models fetches one."),
    name ? drawStanding(name) : null,
    name ? h("div", { class: "row" }, hints.map((hint) => h("button", { type: "button", class: "hint", "data-action": "hint" }, hint))) : null,
  );
}

/** Whether a question would be answered at once; clients are not told. @param {string} name */
function drawStanding(name) {
  const row = state.models?.find((one) => one.name === name);
  if (state.models === null || row?.state === "ready") return null;
  if (row?.state === "loading") return h("div", { "data-key": "standing", "data-standing": row.state }, loading(row), h("p", { class: "note" }, "A question that is sent now is answered when the model is loaded."));
  if (row?.state === "failed") return h("p", { class: "problem", "data-key": "standing", "data-standing": row.state }, `It could not be loaded: ${row.reason ?? "Events says why."}`);
  return h("p", { class: "note", "data-key": "standing", "data-standing": "absent" }, "It is not in memory; the first question loads it.");
}

function drawComposer() {
  const label = "Message";
  return h(
    "form",
    { class: "composer", "data-action": "send", "data-key": "composer" },
    h("label", { class: "unseen", for: "prompt" }, label),
    h("textarea", { id: "prompt", rows: 1, placeholder: `${label} ${asked()}`, "data-action": "prompt", "aria-keyshortcuts": "Enter", enterkeyhint: "send" }),
    view.stop ? h("button", { type: "button", class: "primary round", "data-action": "stop", "aria-label": "Stop" }, icon(ICONS.stop)) : h("button", { type: "submit", class: "primary round", "aria-label": "Send", disabled: !asked() }, icon(ICONS.send)),
  );
}

/** @param {Message} message @param {number} at @param {Message[]} all */
function drawMessage(message, at, all) {
  const key = { "data-key": `${conversation()?.id} ${at} ${message.role}` };
  if (message.role === "user") return drawQuestion(message, at, key);
  const running = view.stop !== null && at === all.length - 1;
  return h(
    "article",
    { class: "answer", "aria-label": "Answer", "aria-busy": String(running), ...key },
    message.reasoning ? h("details", { class: "reasoning" }, h("summary", null, running && !message.content ? "Reasoning…" : "Reasoning"), h("p", null, message.reasoning)) : null,
    h("div", { class: "body", "data-body": at, "data-own": true, "data-key": "body" }),
    (message.tools ?? []).map((call) => h("div", { class: "tool", "data-key": call.id }, h("div", { class: "row" }, h("span", { class: "pill" }, "tool call"), h("b", null, call.name)), h("pre", null, pretty(call.arguments)))),
    running && !message.content && !message.reasoning && !message.tools?.length ? drawPending(message.model ?? "") : null,
    message.error ? drawError(message) : null,
    running ? null : drawFoot(message, at),
  );
}

/** @param {Message} message @param {number} at @param {Record<string, string>} key */
function drawQuestion(message, at, key) {
  if (view.editing === at) {
    return h(
      "form",
      { class: "question editing", "data-action": "save-edit", "data-at": at, ...key },
      h("textarea", { "aria-label": "Edit the message", "data-action": "edited", name: "text", rows: 3 }, message.content),
      h("div", { class: "row end" }, button("cancel-edit", "Cancel"), h("button", { type: "submit", class: "primary" }, "Send")),
    );
  }
  return h("article", { class: "question", "aria-label": "Question", ...key }, h("p", null, message.content), h("div", { class: "acts" }, iconButton("edit", "edit", "Edit", { "data-at": at }), iconButton("copy", "copy", "Copy", { "data-at": at })));
}

/** @param {string} name */
function drawPending(name) {
  const row = state.models?.find((one) => one.name === name);
  if (row?.state !== "loading") return h("p", { class: "pending", role: "status" }, h("i"), h("i"), h("i"), h("span", { class: "unseen" }, "Thinking"));
  return loading(row);
}

/** @param {Message} message */
function drawError(message) {
  const numbers = Object.entries(message.numbers ?? {}).filter(([, value]) => value !== null && typeof value !== "object");
  return h("div", { class: "problem", role: "alert" }, h("p", null, message.error), numbers.length ? h("dl", { class: "figures small" }, numbers.map(([name, value]) => figure(fieldName(name), field(name, value)))) : null, message.content ? null : h("p", { class: "note" }, "The question is left out of what is asked next."));
}

/** @param {Message} message @param {number} at */
function drawFoot(message, at) {
  const figures = message.figures;
  const cached = figures && figures.prompt_tokens ? figures.cached_tokens / figures.prompt_tokens : null;
  return h(
    "footer",
    null,
    figures
      ? h(
          "span",
          { class: "note", "data-figures": true },
          `first token ${duration(figures.first_token_s)}${figures.loaded ? ", the model's load included" : ""}`,
          figures.tokens_per_s === null ? "" : ` · ${rate(figures.tokens_per_s)} tok/s`,
          figures.prompt_tokens ? ` · ${count(figures.completion_tokens)} tokens · prompt of ${count(figures.prompt_tokens)}, ${percent(cached)} cached` : "",
          message.finish === "length" ? " · cut off by the token limit" : message.finish === "stopped" ? " · stopped" : "",
        )
      : null,
    h("span", { class: "acts" }, message.content ? iconButton("copy", "copy", "Copy", { "data-at": at }) : null, iconButton("again", "again", "Regenerate", { "data-at": at })),
  );
}

/** @param {string} text */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

async function send() {
  const prompt = /** @type {HTMLTextAreaElement | null} */ (document.getElementById("prompt"));
  const text = prompt?.value.trim() ?? "";
  if (!prompt || !text || view.stop) return;
  prompt.value = "";
  await ask(text);
}

/** @param {string} text */
async function ask(text) {
  const current = conversation() ?? create(asked(), text);
  current.messages.push({ role: "user", content: text });
  await run();
}

/** @param {number} at */
async function again(at) {
  const current = conversation();
  if (!current) return;
  view.stop?.abort();
  current.messages.length = at;
  await run();
}

/** @param {number} at @param {HTMLElement} form */
async function saveEdit(at, form) {
  const current = conversation();
  const text = form.querySelector("textarea")?.value.trim();
  view.editing = -1;
  if (!current || !text) return;
  view.stop?.abort();
  current.messages.length = at;
  await ask(text);
}

async function run() {
  const current = conversation();
  if (!current) return;
  const stop = new AbortController();
  view.stop = stop;
  view.said = [];
  atEnd = true;
  current.model = asked();
  save(current);
  redraw();
  const message = await answer(current, sampling(), stop.signal, (so_far) => {
    if (view.stop === stop) view.said = spoken(so_far.content, false);
    redraw();
  });
  if (view.stop !== stop) return; // another answer has taken its place
  view.stop = null;
  view.said = message.error ? [] : [...spoken(message.content, true), message.finish === "stopped" ? "Stopped." : "End of the answer."];
  if (!save(current)) notice("This browser keeps no more conversations; delete some.", "bad");
  redraw();
}

/** @param {number} at */
async function copy(at) {
  await navigator.clipboard?.writeText(conversation()?.messages[at]?.content ?? "");
  notice("Copied.");
}

document.addEventListener("pointerdown", (event) => {
  if (view.list && event.target instanceof Element && !event.target.closest('.talks, [data-action="list"]')) showList(false);
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && view.list) showList(false);
  else if (event.key === "Escape") view.stop?.abort();
  const target = event.target;
  if (!(target instanceof HTMLTextAreaElement) || target.id !== "prompt") return;
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  target.form?.requestSubmit();
});

document.addEventListener(
  "scroll",
  (event) => {
    const list = event.target;
    if (list instanceof HTMLElement && list.classList.contains("messages")) atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  },
  true,
);
