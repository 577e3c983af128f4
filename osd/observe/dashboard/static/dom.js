// What all parts of the page draw with. Data reaches the page as text nodes only, never as HTML.

let skew = 0; // server clock minus this browser's, seconds

export const setServerTime = (now) => { skew = now - Date.now() / 1000; };
export const ago = (at) => Math.max(0, Date.now() / 1000 + skew - at);

/** An element with attributes and children; strings become text nodes. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map((child) => child instanceof Node ? child : `${child ?? ""}`));
  return made;
}

export function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const percent = (value) => isNumber(value) ? `${(100 * value).toFixed(1)} %` : "–";
export const points = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(100 * value).toFixed(1)}`;
export const count = (value) => isNumber(value) ? value.toLocaleString("en") : "–";
export const version = (value) => value ? `v${value}` : "–";

export const day = (date) => date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });

/** "14:03:22" of today, "26 Nov 14:03" of another day. */
export function when(at) {
  const then = new Date(1000 * at);
  const time = then.toLocaleTimeString("en-GB");
  return then.toDateString() === new Date().toDateString() ? time : `${day(then)} ${time.slice(0, 5)}`;
}

/** A time shown as by `when`, kept true by `tick`. */
export function moment(at) {
  const then = new Date(1000 * at);
  return element("time", { datetime: then.toISOString(), title: then.toLocaleString(), "data-when": at }, when(at));
}

/** A time shown as "3 s ago", kept true by `tick`. */
export function since(at) {
  return element("time", { "data-at": at, title: new Date(1000 * at).toLocaleString() }, `${duration(ago(at))} ago`);
}

export function tick() {
  const show = (time, text) => { if (time.textContent !== text) time.textContent = text; };
  for (const time of document.querySelectorAll("time[data-at]")) show(time, `${duration(ago(Number(time.dataset.at)))} ago`);
  for (const time of document.querySelectorAll("time[data-when]")) show(time, when(Number(time.dataset.when)));
}

/** Whether `data` differs from last time: what has not changed is not drawn again, so that selections and scrolling survive. */
const drawn = new Map();
export function changed(name, data) {
  const text = JSON.stringify(data);
  if (drawn.get(name) === text) return false;
  drawn.set(name, text);
  return true;
}

export const tag = (tone, text) => element("span", { class: `tag ${tone}` }, text);

/** Rows of a table; one row that says `nothing` without any. */
export function fill(id, rows, columns, nothing) {
  const body = document.getElementById(id);
  if (rows.length) body.replaceChildren(...rows);
  else body.replaceChildren(element("tr", {}, element("td", { class: "none", colspan: columns }, nothing)));
}

export function bytes(value) {
  if (!isNumber(value)) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000 || unit === "GB") return `${value.toFixed(value < 10 && unit !== "B" ? 1 : 0)} ${unit}`;
    value /= 1000;
  }
}

/** A per-second figure: 0, 0.3, 12, 1,200. */
export const rate = (value) => isNumber(value) ? (value < 10 && value > 0 ? value.toFixed(1) : count(Math.round(value))) : "–";
