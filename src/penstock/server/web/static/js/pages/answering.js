// One answer of a model: the request, its stream into a message, and how fast it was.

import { events, Problem } from "../api.js";
import { state } from "../live.js";
import { fields } from "./sampling.js";

/** @typedef {import("../types").Message} Message */
/** @typedef {import("../types").Conversation} Conversation */

/**
 * Ask for the next message and add it as it comes; it is complete when this returns.
 * @param {Conversation} conversation
 * @param {import("../types").Sampling} options
 * @param {AbortSignal} signal
 * @param {(message: Message) => void} changed
 * @returns {Promise<Message>}
 */
export async function answer(conversation, options, signal, changed) {
  const before = [...conversation.messages];
  /** @type {Message} */
  const message = { role: "assistant", content: "", model: conversation.model };
  conversation.messages.push(message);
  const model = state.models?.find(({ name }) => name === conversation.model);
  const loaded = state.models !== null && model?.state !== "ready" && model?.state !== "draining";
  const clock = { began: performance.now(), first: 0, last: 0, loaded };
  try {
    const body = request(conversation.model, before, options);
    for await (const piece of events("v1/chat/completions", body, signal)) {
      if (piece.error) throw new Problem(piece.error.message, 0, piece.error.penstock ?? null);
      if (take(message, piece)) {
        clock.last = performance.now();
        clock.first ||= clock.last;
      }
      if (piece.usage) message.figures = figures(piece.usage, clock);
      changed(message);
    }
  } catch (error) {
    failed(message, error);
  }
  message.figures ??= figures(null, clock);
  if (!clock.first) delete message.figures;
  return message;
}

/**
 * The sentences of a text that are complete, for those who hear it instead of seeing it.
 * @param {string} text
 * @param {boolean} ended
 */
export function spoken(text, ended) {
  const parts = text.split(/(?<=[.!?:;]\s)|\n+/).map((part) => part.trim());
  return (ended ? parts : parts.slice(0, -1)).filter(Boolean);
}

/** @param {string} model @param {Message[]} before @param {import("../types").Sampling} options */
function request(model, before, options) {
  // A question that was refused would have all later ones refused as well.
  const refused = (/** @type {Message | undefined} */ one) => one?.role === "assistant" && one.error && !one.content;
  const said = before.filter((one, at) => !refused(one) && !refused(before[at + 1])).map(({ role, content }) => ({ role, content }));
  const system = options.system.trim() ? [{ role: "system", content: options.system }] : [];
  return { model, messages: [...system, ...said], stream: true, stream_options: { include_usage: true }, ...fields() };
}

/**
 * Whether a piece had something of the answer.
 * @param {Message} message
 * @param {any} piece
 */
function take(message, piece) {
  const choice = piece.choices?.[0];
  if (!choice) return false;
  if (choice.finish_reason) message.finish = choice.finish_reason;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
  if (content) message.content += content;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  for (const call of calls ?? []) {
    message.tools ??= [];
    const known = (message.tools[call.index] ??= { id: call.id ?? String(call.index), name: "", arguments: "" });
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  return Boolean(content || reasoning || calls?.length);
}

/**
 * @param {any} usage
 * @param {{ began: number, first: number, last: number, loaded: boolean }} clock
 */
function figures(usage, clock) {
  const tokens = usage?.completion_tokens ?? 0;
  const seconds = (clock.last - clock.first) / 1000;
  return {
    first_token_s: clock.first ? (clock.first - clock.began) / 1000 : null,
    tokens_per_s: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
    prompt_tokens: usage?.prompt_tokens ?? 0,
    cached_tokens: usage?.prompt_tokens_details?.cached_tokens ?? 0,
    completion_tokens: tokens,
    ...(clock.loaded ? { loaded: true } : {}),
  };
}

/** @param {Message} message @param {unknown} error */
function failed(message, error) {
  if (error instanceof DOMException && error.name === "AbortError") message.finish = "stopped";
  else if (error instanceof Problem) {
    message.error = error.message;
    message.numbers = error.numbers;
  } else if (error instanceof SyntaxError) message.error = `The tools are not JSON: ${error.message}`;
  else if (error instanceof TypeError) message.error = "The connection to the server broke.";
  else throw error;
}
