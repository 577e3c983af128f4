// What is speculated now, what it brings, and which draft tokens are accepted.

import { changed, count, element, fill, isNumber, moment, percent, tag } from "./dom.js";

const REASONS = {
  goodput: "another plan promises more tokens per second", load: "the number of requests changed", probe: "a draft that is not used is tried",
  trial: "a plan whose step time is hardly known is tried", "net window": "the whole engine runs without speculation, to measure what it gains",
  forced: "a choice is forced, to measure it",
};

const times = (value) => isNumber(value) ? `${value.toFixed(2)}×` : "–";
const speed = (value) => isNumber(value) ? `${value.toFixed(value < 100 ? 1 : 0)} tok/s` : "–";

/** A bar of parts, [[class, share], ...]; widths are set by script, as the page allows no style attributes. */
function bar(parts, title) {
  return element("span", { class: "bar", title }, ...parts.map(([name, share]) => {
    const part = element("i", { class: name });
    part.style.width = `${100 * share}%`;
    return part;
  }));
}

function netSpeedUp(figures) {
  const windows = `${count(figures.num_net_windows)} window${figures.num_net_windows === 1 ? "" : "s"}`;
  if (!isNumber(figures.net_ratio)) return element("td", { class: "none", title: "No window without speculation has ended yet" }, "not measured yet");
  const isKnown = isNumber(figures.net_low) && isNumber(figures.net_high);
  const interval = isKnown ? ` (${figures.net_low.toFixed(2)} … ${figures.net_high.toFixed(2)})` : "";
  const title = `Tokens/s with speculation / without, in ${windows}` + (isKnown ? ", with its 95 % interval" : "; an interval needs three");
  return element("td", { title }, element("b", {}, times(figures.net_ratio)), interval);
}

function stepTime(seconds) {
  const whole = Object.values(seconds).reduce((sum, s) => sum + s, 0);
  if (!whole) return element("td", { class: "none", title: "This engine reports no parts" }, "–");
  const parts = Object.entries(seconds).map(([part, s]) => [part, s / whole]);
  const title = Object.entries(seconds).map(([part, s]) => `${part}: ${s.toFixed(1)} s`).join(", ");
  const keys = parts.map(([part, share]) => element("span", { class: "key" }, element("span", { class: `swatch part ${part}` }), `${part} ${Math.round(100 * share)} %`));
  return element("td", { class: "split", title }, bar(parts.map(([part, share]) => [`part ${part}`, share]), title), element("span", { class: "legend" }, ...keys));
}

function planCells(figures) {
  const plans = Object.entries(figures.plans).map(([plan, t]) => `${plan}: ${count(t.steps)} steps, ${t.seconds ? speed(t.tokens / t.seconds) : "–"}`);
  return [
    element("td", { title: "speculation.mode" }, figures.mode || "–"),
    element("td", { title: plans.join("\n") || "No pure decoding step yet" }, element("b", {}, figures.plan || "–")),
    element("td", { title: "Draft tokens the plan proposes for each request" }, count(figures.k)),
    element("td", { title: "Requests decoded together when the plan was made" }, count(figures.batch)),
    netSpeedUp(figures),
    element("td", { title: "Expected tokens of a step / expected seconds of a step, with this batch" }, speed(figures.predicted_tokens_per_second)),
    element("td", { title: `Tokens / seconds of all steps with this plan. ${plans.join("; ")}` }, speed(figures.measured_tokens_per_second)),
    element("td", { title: "Decode steps with the plan off / all decode steps" }, percent(figures.off_share)),
    stepTime(figures.seconds_per_part),
  ];
}

/** Rows of [label, tested, accepted] as a bar with its share. */
function showAcceptance(id, rows) {
  fill(id, rows.map(([label, tested, accepted]) => {
    const title = `${count(accepted)} accepted of ${count(tested)} tested draft tokens`;
    return element("tr", { title },
      element("th", { scope: "row" }, label),
      element("td", { class: "wide" }, bar([["alpha", tested ? accepted / tested : 0]], title)),
      element("td", {}, tested ? percent(accepted / tested) : "–"));
  }), 3, "No draft token was tested yet.");
}

/** [label, tested, accepted] summed over replicas; `entries` gives one replica's [label, [tested, accepted]]. */
function tally(figures, entries) {
  const sums = new Map();
  for (const [label, [tested, accepted]] of figures.flatMap(entries)) {
    const [t, a] = sums.get(label) ?? [0, 0];
    sums.set(label, [t + tested, a + accepted]);
  }
  return [...sums].map(([label, [tested, accepted]]) => [label, tested, accepted]);
}

const QUANTILE_NAMES = { "0.1": "10 %", "0.25": "25 %", "0.5": "median", "0.75": "75 %", "0.9": "90 %" };

export function showSpeculation(replicas) {
  const known = replicas.filter((r) => r.speculation_figures);
  if (!changed("speculation", known.map((r) => [r.replica, r.k, r.speculation_figures]))) return;
  const figures = known.map((r) => r.speculation_figures);
  fill("speculation", known.flatMap(({ replica, k, speculation_figures: shown }) => [
    element("tr", {}, element("td", {}, replica), ...planCells(shown)),
    ...(shown.problem ? [element("tr", {}, element("td", { class: "problem", colspan: 10 }, tag("bad", "problem"), `the control has ended, k stays at ${k}: ${shown.problem}`))] : []),
    ...(Object.keys(shown.undrafted).length ? [element("tr", {}, element("td", { class: "none", colspan: 10 }, `requests that are not drafted for: ${Object.entries(shown.undrafted).map(([reason, n]) => `${count(n)} with ${reason}`).join(", ")}`))] : []),
  ]), 10, "No replica has reported what it speculates: k is fixed, or no request has come yet.");
  const probes = figures.some((f) => isNumber(f.num_probes)) ? figures.reduce((sum, f) => sum + (f.num_probes ?? 0), 0) : null;
  const place = document.getElementById("speculation-count");
  place.textContent = probes === null ? "" : `${count(probes)} probe${probes === 1 ? "" : "s"}`;
  place.title = "Times an unused draft was tried, to see whether it has become worth it";
  document.getElementById("anatomy").hidden = known.length === 0;
  showAcceptance("places", tally(figures, (f) => f.positions.map((pair, i) => [`${i + 1}.`, pair])));
  showAcceptance("sources", tally(figures, (f) => Object.entries(f.sources)));
  const byLength = (pairs) => Object.entries(pairs).map(([name, pair]) => [`${name.replace(">=", "≥ ").replace("<", "< ")} tokens`, pair]);
  showAcceptance("contexts", tally(figures, (f) => byLength(f.contexts)));
  showAcceptance("outputs", tally(figures, (f) => byLength(f.outputs)));
  fill("spread", known.flatMap(({ replica, speculation_figures: { spread } }) => Object.entries(spread).map(([quantile, alpha]) => {
    const title = `${replica}: ${QUANTILE_NAMES[quantile] ?? quantile} of the requests that ended lately had a lower α`.replace("median", "half");
    return element("tr", { title },
      element("th", { scope: "row" }, `${known.length > 1 ? `${replica} ` : ""}${QUANTILE_NAMES[quantile] ?? quantile}`),
      element("td", { class: "wide" }, bar([["alpha", alpha]], title)),
      element("td", {}, percent(alpha)));
  })), 3, "No request has ended yet.");
}

/** The newest changes of plan first; with several replicas, each with its name. */
export function showChanges(changes, isMany) {
  if (!changed("changes", [changes, isMany])) return;
  const list = document.getElementById("changes");
  if (!changes.length) return list.replaceChildren(element("li", { class: "none" }, "The plan has not changed."));
  list.replaceChildren(...[...changes].reverse().map((change) => {
    const requests = isNumber(change.batch) ? `, batch ${count(change.batch)}` : "";
    const text = `${isMany ? `${change.replica}: ` : ""}${change.from || "–"} → ${change.to || "–"}${requests}`;
    const reason = tag("", change.reason || "unknown");
    reason.title = REASONS[change.reason] ?? "";
    return element("li", {}, moment(change.at), reason, element("span", { class: "text" }, text));
  }));
}
