// What is being looked at, kept in the address, so that a link or a reload restores it: #range=1h&by=class&metric=alpha

export const RANGES = { "5min": [300, 2], "1h": [3600, 12], "24h": [86400, 180], "7d": [604800, 1200] }; // seconds shown, seconds per point

const ALLOWED = {
  range: Object.keys(RANGES),
  metric: ["alpha", "acceptance_rate", "acceptance_length"],
  by: ["", "class", "replica", "position"],
  raw: ["1", "0"],
  events: ["all", "problems", "learning", "serving", "hand"],
};
const FREE = { event: /^\d+(\.\d+)?$/, compare: /^\d+-\d+$/ };

const state = new URLSearchParams(location.hash.slice(1));
const listeners = [];

/** The chosen value; the first allowed one when the address says nothing or nonsense. */
export function chosen(name) {
  const value = state.get(name) ?? "";
  if (FREE[name]) return FREE[name].test(value) ? value : "";
  return ALLOWED[name].includes(value) ? value : ALLOWED[name][0];
}

export function choose(name, value) {
  if (value === "" || ALLOWED[name]?.[0] === value) state.delete(name);
  else state.set(name, value);
  history.replaceState(null, "", `#${state}`);
  listeners.forEach((listener) => listener(name));
}

/** Calls `listener(name)` after each choice. */
export const onChoice = (listener) => listeners.push(listener);

/** The address of this page with one choice changed. */
export function linkWith(name, value) {
  const other = new URLSearchParams(state);
  other.set(name, value);
  return `#${other}`;
}

/** Radio buttons, selects and boxes with data-choice="name" follow the state, and change it. */
export function bindControls() {
  for (const input of document.querySelectorAll("[data-choice]")) {
    const name = input.dataset.choice;
    const show = () => {
      if (input.type === "radio") input.checked = input.value === chosen(name);
      else if (input.type === "checkbox") input.checked = chosen(name) === "1";
      else input.value = chosen(name);
    };
    show();
    onChoice((changed) => changed === name && show());
    input.addEventListener("change", () => choose(name, input.type === "checkbox" ? (input.checked ? "1" : "0") : input.value));
  }
}

window.addEventListener("hashchange", () => {
  const now = new URLSearchParams(location.hash.slice(1));
  const names = new Set([...state.keys(), ...now.keys()]);
  [...state.keys()].forEach((name) => state.delete(name));
  now.forEach((value, name) => state.set(name, value));
  names.forEach((name) => listeners.forEach((listener) => listener(name)));
});
