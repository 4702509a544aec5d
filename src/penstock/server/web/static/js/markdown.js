// Markdown to nodes. What a model writes never becomes markup: every text is a text node, links lead
// only to web and mail addresses, and pictures of elsewhere are shown as links.

import { h, icon, ICONS } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*([\s\S]+?)\*\*|__([\s\S]+?)__|~~([\s\S]+?)~~|\*([^\s*][^*]*?)\*|(?<!\w)_([^\s_][^_]*?)_(?!\w)|!?\[([^\]]*)\]\(([^()\s]+(?:\([^()\s]*\))?)[^)]*\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])|\\([\\`*_{}[\]()#+\-.!~|>])/g;

/**
 * @param {string} text
 * @returns {Node[]}
 */
export function markdown(text) {
  return blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
}

/**
 * @param {string[]} lines
 * @param {number} depth quotes and lists inside each other
 * @returns {Node[]}
 */
function blocks(lines, depth) {
  /** @type {Node[]} */
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const taken =
      blank(line) ?? fence(lines, at, found) ?? heading(line, found) ?? rule(line, found) ??
      (depth < 6 ? (quote(lines, at, found, depth) ?? list(lines, at, found, depth)) : null) ??
      grid(lines, at, found) ?? paragraph(lines, at, found);
    at += taken;
  }
  return found;
}

/** @param {string} line */
const blank = (line) => (line.trim() === "" ? 1 : null);

/** @param {string[]} lines @param {number} at @param {Node[]} found */
function fence(lines, at, found) {
  const open = FENCE.exec(lines[at]);
  if (open === null) return null;
  let end = at + 1;
  const closing = new RegExp(`^ {0,3}\\${open[1][0]}{${open[1].length},}\\s*$`);
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  found.push(code(lines.slice(at + 1, end).join("\n"), open[2]));
  return end + 1 - at;
}

/**
 * A block of code with its language and a button that copies it.
 * @param {string} text
 * @param {string} language
 */
export function code(text, language) {
  const copy = h("button", { type: "button", class: "quiet square", "data-action": "copy-code", "aria-label": "Copy the code" }, icon(ICONS.copy));
  return h(
    "div",
    { class: "code" },
    h("div", { class: "code-head" }, h("span", null, language || "text"), copy),
    h("pre", { tabindex: 0 }, h("code", null, language ? coloured(text) : text)),
  );
}

const TOKENS = /(\/\/.*|#(?![{\w]*[;)]).*|\/\*[\s\S]*?\*\/|--\s.*)|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)|\b(\d[\d_.]*(?:e[+-]?\d+)?|0x[\da-f]+)\b|\b(def|class|return|if|elif|else|for|while|in|of|import|from|as|with|try|except|finally|raise|yield|lambda|async|await|pass|break|continue|and|or|not|is|None|True|False|const|let|var|function|new|typeof|this|null|undefined|true|false|struct|enum|impl|fn|pub|use|match|mut|static|void|int|char|float|double|bool|string|public|private|switch|case|default|do|throw|catch|interface|type|extends|package|func|go|defer|select|where|join|insert|update|delete|create|echo|then|fi|done|export)\b/gi;

/**
 * Comments, strings, numbers and words that most languages share; no more is known of any.
 * @param {string} text
 * @returns {Node[]}
 */
function coloured(text) {
  if (text.length > 20000) return [document.createTextNode(text)];
  /** @type {Node[]} */
  const found = [];
  let end = 0;
  for (const match of text.matchAll(TOKENS)) {
    if (match.index > end) found.push(document.createTextNode(text.slice(end, match.index)));
    const kind = match[1] ? "c-note" : match[2] ? "c-text" : match[3] ? "c-number" : "c-word";
    found.push(h("span", { class: kind }, match[0]));
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push(document.createTextNode(text.slice(end)));
  return found;
}

/** @param {string} line @param {Node[]} found */
function heading(line, found) {
  const match = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/.exec(line);
  if (match === null) return null;
  // The page's own headings end at the second level.
  found.push(h(`h${Math.min(match[1].length + 2, 6)}`, null, inline(match[2])));
  return 1;
}

/** @param {string} line @param {Node[]} found */
function rule(line, found) {
  if (!RULE.test(line)) return null;
  found.push(h("hr"));
  return 1;
}

/** @param {string[]} lines @param {number} at @param {Node[]} found @param {number} depth */
function quote(lines, at, found, depth) {
  let end = at;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  if (end === at) return null;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  found.push(h("blockquote", null, blocks(inner, depth + 1)));
  return end - at;
}

/** @param {string[]} lines @param {number} at @param {Node[]} found @param {number} depth */
function list(lines, at, found, depth) {
  const first = ITEM.exec(lines[at]);
  if (first === null || first[1].length > 3) return null;
  const ordered = /\d/.test(first[2]);
  /** @type {string[][]} */
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (item !== null && item[1].length < 2 && /\d/.test(item[2]) === ordered && !RULE.test(lines[end])) {
      items.push([item[3]]);
    } else if (/^\s{2,}\S/.test(lines[end])) {
      items[items.length - 1].push(lines[end].replace(/^ {2,4}/, ""));
    } else if (lines[end].trim() === "" && continues(lines, end + 1, ordered)) {
      items[items.length - 1].push("");
    } else break;
    end += 1;
  }
  if (items.length === 0) return null;
  const start = ordered ? Number.parseInt(first[2], 10) : null;
  const nodes = items.map((inner) => h("li", null, unwrapped(blocks(inner, depth + 1))));
  found.push(h(ordered ? "ol" : "ul", { start: start === 1 ? null : start }, nodes));
  return end - at;
}

/** Whether a list goes on behind an empty line. @param {string[]} lines @param {number} at @param {boolean} ordered */
function continues(lines, at, ordered) {
  if (at >= lines.length) return false;
  const item = ITEM.exec(lines[at]);
  return (item !== null && /\d/.test(item[2]) === ordered) || /^\s{2,}\S/.test(lines[at]);
}

/** A list's item of one paragraph is that paragraph's content. @param {Node[]} nodes */
function unwrapped(nodes) {
  const [first, ...rest] = nodes;
  return first instanceof HTMLParagraphElement ? [...first.childNodes, ...rest] : nodes;
}

/** @param {string[]} lines @param {number} at @param {Node[]} found */
function grid(lines, at, found) {
  if (!lines[at].includes("|") || !/^ *\|?( *:?-+:? *\|)+ *:?-*:? *$/.test(lines[at + 1] ?? "")) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const [head, ...body] = [lines[at], ...lines.slice(at + 2, end)].map(cells);
  found.push(
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        null,
        h("thead", null, h("tr", null, head.map((cell) => h("th", null, inline(cell))))),
        h("tbody", null, body.map((row) => h("tr", null, row.map((cell) => h("td", null, inline(cell)))))),
      ),
    ),
  );
  return end - at;
}

/** @param {string} line */
const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

/** @param {string[]} lines @param {number} at @param {Node[]} found */
function paragraph(lines, at, found) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !starts(lines[end])) end += 1;
  found.push(h("p", null, inline(lines.slice(at, end).join("\n"))));
  return end - at;
}

/** Whether a line begins something else than a paragraph. @param {string} line */
const starts = (line) => FENCE.test(line) || /^ {0,3}(#{1,6}\s|>)/.test(line) || ITEM.test(line) || RULE.test(line);

/**
 * @param {string} text
 * @param {number} depth
 * @returns {Node[]}
 */
function inline(text, depth = 0) {
  // What does not end costs the square of its length.
  if (depth > 6 || text.length > 20000) return [document.createTextNode(text)];
  /** @type {Node[]} */
  const found = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) found.push(...broken(text.slice(end, match.index)));
    found.push(span(match, depth));
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push(...broken(text.slice(end)));
  return found;
}

/**
 * @param {RegExpMatchArray} match
 * @param {number} depth
 * @returns {Node}
 */
function span(match, depth) {
  const [whole, , mono, bold, bold2, struck, slanted, slanted2, label, target, address, escaped] = match;
  if (mono !== undefined) return h("code", null, mono.trim() || mono);
  if (bold ?? bold2) return h("strong", null, inline(bold ?? bold2, depth + 1));
  if (struck) return h("del", null, inline(struck, depth + 1));
  if (slanted ?? slanted2) return h("em", null, inline(slanted ?? slanted2, depth + 1));
  if (target !== undefined) return link(target, inline(label || target, depth + 1), whole);
  if (address) return link(address, [document.createTextNode(address)], whole);
  return document.createTextNode(escaped ?? whole);
}

/**
 * @param {string} target
 * @param {Node[]} label
 * @param {string} written
 */
function link(target, label, written) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return document.createTextNode(written);
  return h("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}

/** Lines that end with two spaces are broken there. @param {string} text */
function broken(text) {
  const parts = text.split(/ {2,}\n/);
  return parts.flatMap((part, at) => (at ? [h("br"), document.createTextNode(part)] : [document.createTextNode(part)]));
}
