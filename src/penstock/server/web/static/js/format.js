// Figures as people read them. Sizes are in binary units, as in the server's own sentences.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** @param {number | null | undefined} size */
export function bytes(size) {
  if (size === null || size === undefined) return "–";
  let value = Math.abs(size);
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${size < 0 ? "−" : ""}${value.toFixed(digits)} ${UNITS[unit]}`;
}

/** A size as settings have it: exact, in the largest unit that leaves a whole number. @param {number} size */
export function sizeText(size) {
  let value = size;
  let unit = 0;
  while (value >= 1024 && value % 1024 === 0 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return unit ? `${value}${UNITS[unit]}` : String(size);
}

/** @param {number} size */
export function exactBytes(size) {
  return `${count(size)} bytes`;
}

/** @param {number | null | undefined} value */
export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-US");
}

/** @param {number | null | undefined} value */
export function short(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of /** @type {[number, string][]} */ ([[1e9, "B"], [1e6, "M"], [1e4, "k"]])) {
    if (value >= size) return `${(value / (unit === "k" ? 1e3 : size)).toFixed(value < 10 * size ? 1 : 0)}${unit}`;
  }
  return count(value);
}

/** @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  if (seconds < 90) return `${seconds.toFixed(0)} s`;
  const whole = Math.round(seconds);
  if (whole < 600) return whole % 60 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${whole / 60} min`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  const hours = seconds / 3600;
  return hours < 36 ? `${hours.toFixed(1)} h` : `${(hours / 24).toFixed(1)} days`;
}

/** @param {number | null | undefined} value */
export function rate(value) {
  return value === null || value === undefined ? "–" : value.toFixed(value > 0 && value < 10 ? 1 : 0);
}

/** @param {number | null | undefined} share */
export function percent(share) {
  return share === null || share === undefined || Number.isNaN(share) ? "–" : `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

/** @param {number} at seconds since 1970 */
export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

/** @param {number} at seconds since 1970 */
export function moment(at) {
  const day = new Date(at * 1000);
  const today = day.toDateString() === new Date().toDateString();
  return today ? clock(at) : `${day.toLocaleDateString()} ${clock(at)}`;
}

/**
 * The name of an owner in the books, as its model is called.
 * @param {string} owner
 */
export function ownerName(owner) {
  return owner.replace(/^model[: ]/, "");
}

/**
 * A field's name in words: its unit stands with the value.
 * @param {string} name
 */
export function fieldName(name) {
  return name.replace(/_(s|bytes)$/, "").replaceAll("_", " ");
}

const NAMES = new Set(["pid", "port", "status", "signal", "exit_code"]); // numbers that count nothing

/**
 * A field's value in words.
 * @param {string} name
 * @param {unknown} value
 */
export function field(name, value) {
  if (typeof value === "number" && name.endsWith("bytes")) return bytes(value);
  if (typeof value === "number" && name.endsWith("_s")) return duration(value);
  if (typeof value === "number") return NAMES.has(name) ? String(value) : count(value);
  if (Array.isArray(value)) return value.length ? value.map(String).join(", ") : "none";
  return typeof value === "string" ? value : JSON.stringify(value);
}
