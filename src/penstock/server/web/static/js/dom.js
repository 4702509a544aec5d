// Nodes from plain calls, and changes of a drawn tree in place. No text ever becomes markup.

/** @typedef {Node | string | number | false | null | undefined} Child */
/** @typedef {Record<string, string | number | boolean | null | undefined>} Attributes */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An HTML element. `true` sets an attribute without a value; false, null and undefined leave it out.
 * @param {string} tag
 * @param {Attributes | null} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElement}
 */
export function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  fill(node, attributes ?? {}, children);
  return node;
}

/**
 * An SVG element.
 * @param {string} tag
 * @param {Attributes | null} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {SVGElement}
 */
export function svg(tag, attributes, ...children) {
  const node = /** @type {SVGElement} */ (document.createElementNS(SVG, tag));
  fill(node, attributes ?? {}, children);
  return node;
}

/**
 * @param {Element} node
 * @param {Attributes} attributes
 * @param {(Child | Child[])[]} children
 */
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === false || child === null || child === undefined) continue;
    node.append(child instanceof Node ? child : String(child));
  }
}

/**
 * Make `old` like `fresh`, keeping what is the same: focus, selection and scrolling stay. Children
 * with `data-key` are found again wherever they have moved to.
 * @param {Element} old
 * @param {Element} fresh
 */
export function morph(old, fresh) {
  if (old.hasAttribute("data-own")) return; // filled by somebody else
  for (const { name } of [...old.attributes]) {
    // Whether a fold is open is the reader's choice.
    if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of [...fresh.attributes]) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  morphField(old, fresh);
  morphChildren(old, [...fresh.childNodes]);
  const chosen = fresh.getAttribute("data-value");
  if (chosen !== null && old instanceof HTMLSelectElement && document.activeElement !== old) old.value = chosen;
}

/**
 * A field shows what was drawn, unless somebody is at it.
 * @param {Element} old
 * @param {Element} fresh
 */
function morphField(old, fresh) {
  if (document.activeElement === old) return;
  if (old instanceof HTMLInputElement && fresh instanceof HTMLInputElement) {
    if (fresh.hasAttribute("value") && old.value !== fresh.value) old.value = fresh.value;
    if (old.checked !== fresh.checked) old.checked = fresh.checked;
  }
}

/**
 * @param {Element} parent
 * @param {Node[]} fresh
 */
export function morphChildren(parent, fresh) {
  const kept = pairs(parent, fresh);
  const staying = new Set(kept.values());
  for (const child of [...parent.childNodes]) if (!staying.has(child)) child.remove();
  let place = parent.firstChild;
  for (const node of fresh) {
    const old = kept.get(node);
    if (old === undefined) {
      parent.insertBefore(node, place);
      continue;
    }
    if (old === place) place = place.nextSibling;
    else parent.insertBefore(old, place);
    if (old instanceof Element) morph(old, /** @type {Element} */ (node));
    else if (old.nodeValue !== node.nodeValue) old.nodeValue = node.nodeValue;
  }
}

/**
 * The nodes of the old tree that new ones continue: by key, otherwise the next of the same kind, so
 * that what comes or goes between two siblings replaces neither.
 * @param {Element} parent
 * @param {Node[]} fresh
 */
function pairs(parent, fresh) {
  /** @type {Map<string, Element>} */
  const keyed = new Map();
  /** @type {ChildNode[]} */
  const others = [];
  for (const child of parent.childNodes) {
    const key = child instanceof Element ? child.getAttribute("data-key") : null;
    if (key === null) others.push(child);
    else keyed.set(key, /** @type {Element} */ (child));
  }
  /** @type {Map<Node, ChildNode>} */
  const found = new Map();
  let from = 0;
  for (const node of fresh) {
    const key = node instanceof Element ? node.getAttribute("data-key") : null;
    if (key !== null) {
      const old = keyed.get(key);
      keyed.delete(key);
      if (old !== undefined && old.nodeName === node.nodeName) found.set(node, old);
      continue;
    }
    const wanted = kind(node);
    let at = from;
    while (at < others.length && kind(others[at]) !== wanted) at += 1;
    if (at === others.length) continue;
    found.set(node, others[at]);
    from = at + 1;
  }
  return found;
}

/** What a node is: its name and its first class, as further classes say its state. @param {Node} node */
const kind = (node) => (node instanceof Element ? `${node.nodeName} ${node.classList[0] ?? ""}` : node.nodeName);

/**
 * The nearest element that says what pressing or changing it means.
 * @param {Event} event
 * @returns {HTMLElement | null}
 */
export function actor(event) {
  const target = event.target instanceof Element ? event.target : null;
  return target?.closest("[data-action]") ?? null;
}

/**
 * A line drawing in the colour of the text.
 * @param {string} path
 */
export function icon(path) {
  return svg(
    "svg",
    { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true", focusable: "false" },
    svg("path", { d: path }),
  );
}

export const ICONS = {
  memory: "M4 7h16v10H4zM8 7v10M13 7v10M7 4v3M12 4v3M17 4v3M7 17v3M12 17v3M17 17v3",
  settings: "M4 7h8M18 7h2M15 5v4M4 12h2M12 12h8M9 10v4M4 17h6M16 17h4M13 15v4",
  models: "M12 3l8 4.5v9L12 21l-8-4.5v-9zM4 7.5l8 4.5 8-4.5M12 12v9",
  requests: "M4 6h10M4 12h16M4 18h7M18 4l3 2-3 2",
  chat: "M4 5h16v11H10l-5 4v-4H4zM8 9h8M8 12h5",
  cache: "M4 6c0-4 16-4 16 0v12c0 4-16 4-16 0zM4 6c0 4 16 4 16 0M4 12c0 4 16 4 16 0",
  bench: "M4 19a9 9 0 1 1 16 0M12 17l4-6M4 19h3M17 19h3M12 7v2",
  events: "M5 5h14M5 10h14M5 15h9M5 20h6",
  theme: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  signout: "M10 4H5v16h5M14 8l4 4-4 4M18 12H9",
  more: "M5 12h.1M12 12h.1M19 12h.1",
  plus: "M12 5v14M5 12h14",
  stop: "M7 7h10v10H7z",
  send: "M12 20V5M6 11l6-6 6 6",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  again: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  edit: "M5 19l1-4L16 5l3 3L9 18zM14 7l3 3",
  close: "M6 6l12 12M18 6L6 18",
  pin: "M9 4h6l-1 6 4 4H6l4-4zM12 14v6",
  sliders: "M4 8h9M17 8h3M15 6v4M4 16h3M11 16h9M9 14v4",
  list: "M8 6h12M8 12h12M8 18h12M4 6h.1M4 12h.1M4 18h.1",
  down: "M6 9l6 6 6-6",
};
