// Calls of the server: answers, refusals as `Problem`s with the server's own sentence, and streams.

/** A refusal: the server's sentence, with its numbers where there are some. */
export class Problem extends Error {
  /**
   * @param {string} message
   * @param {number} status
   * @param {Record<string, unknown> | null} numbers
   */
  constructor(message, status = 0, numbers = null) {
    super(message);
    this.status = status;
    this.numbers = numbers;
  }
}

/** Hears that the session has ended. */
export const access = { lost: () => {} };

/**
 * @param {string} method
 * @param {string} path relative to the page
 * @param {unknown} [body]
 * @param {AbortSignal} [signal]
 * @returns {Promise<Response>}
 */
async function send(method, path, body, signal) {
  /** @type {RequestInit} */
  const request = { method, credentials: "same-origin", cache: "no-store" };
  if (signal) request.signal = signal;
  if (body !== undefined) {
    request.headers = { "content-type": "application/json" };
    request.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, request);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Problem("The server does not answer; see whether penstock serve still runs.");
  }
  if (response.ok) return response;
  const problem = await refusal(response);
  if (response.status === 401 && !path.startsWith("web/")) access.lost();
  throw problem;
}

/** @param {Response} response */
async function refusal(response) {
  try {
    const { error } = await response.json();
    return new Problem(error.message, response.status, error.penstock ?? null);
  } catch {
    return new Problem(`The server answered ${response.status}.`, response.status);
  }
}

/**
 * @param {string} method
 * @param {string} path
 * @param {unknown} [body]
 * @returns {Promise<any>}
 */
export async function call(method, path, body) {
  return (await send(method, path, body)).json();
}

/** @param {string} path */
export const get = (path) => call("GET", path);

/**
 * @param {string} path
 * @param {unknown} [body]
 */
export const post = (path, body = {}) => call("POST", path, body);

/**
 * The JSON of a stream's events, one after the other.
 * @param {string} path
 * @param {unknown} body
 * @param {AbortSignal} [signal]
 * @returns {AsyncGenerator<any>}
 */
export async function* events(path, body, signal) {
  const response = await send("POST", path, body, signal);
  if (response.body === null) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop() ?? "";
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:"));
      const text = data.map((line) => line.slice(5).trimStart()).join("\n");
      if (text && text !== "[DONE]") yield JSON.parse(text);
    }
  }
}

/** A model's name in a path: its slashes stay. @param {string} name */
export const inPath = (name) => name.split("/").map(encodeURIComponent).join("/");
