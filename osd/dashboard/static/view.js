// Everything on the page but the charts. Data reaches the page as text nodes only, never as HTML.

let skew = 0; // server clock minus this browser's, seconds

export const setServerTime = (now) => { skew = now - Date.now() / 1000; };
const ago = (at) => Math.max(0, Date.now() / 1000 + skew - at);

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

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const percent = (value) => isNumber(value) ? `${(100 * value).toFixed(1)} %` : "–";
const points = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(100 * value).toFixed(1)}`;
const count = (value) => isNumber(value) ? value.toLocaleString("en") : "–";
const version = (value) => value ? `v${value}` : "–";

function moment(at) {
  const then = new Date(1000 * at);
  const time = then.toLocaleTimeString("en-GB");
  const isToday = then.toDateString() === new Date().toDateString();
  const text = isToday ? time : `${then.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time.slice(0, 5)}`;
  return element("time", { datetime: then.toISOString(), title: then.toLocaleString() }, text);
}

/** A time shown as "3 s ago", kept true by `tick`. */
function since(at) {
  return element("time", { "data-at": at, title: new Date(1000 * at).toLocaleString() }, `${duration(ago(at))} ago`);
}

export function tick() {
  for (const time of document.querySelectorAll("time[data-at]")) time.textContent = `${duration(ago(Number(time.dataset.at)))} ago`;
}

/** Calls `draw` only when `data` differs from last time, so that selections and scrolling survive. */
const drawn = new Map();
function changed(name, data) {
  const text = JSON.stringify(data);
  if (drawn.get(name) === text) return false;
  drawn.set(name, text);
  return true;
}

const tag = (tone, text) => element("span", { class: `tag ${tone}` }, text);

// ---- head and figures ----

export function showSubtitle(status) {
  if (!changed("subtitle", [status.deployment, status.target, status.draft])) return;
  const parts = [`deployment ${status.deployment}`];
  if (status.target) parts.push(`target ${status.target}`);
  if (status.draft) parts.push(`draft ${status.draft}`);
  document.getElementById("subtitle").textContent = parts.join(" · ");
  document.title = `${status.deployment} · online speculative distillation`;
}

function trainingState(status) {
  if (status.paused) return { value: "paused", hint: "osd resume", tone: "warn" };
  if (status.pinned) return { value: `pinned v${status.pinned}`, hint: "osd unpin", tone: "warn" };
  if (status.trainer === "away") return { value: "away", hint: "trying again", tone: "warn" };
  if (status.training === false) return { value: "off", hint: "trainer.enabled is false" };
  return { value: status.phase || "on", hint: status.phase_detail || "from live traffic" };
}

/** The row of headline figures. They carry their formula; those of an idle service are greyed, with their age. */
export function showFigures(status) {
  const now = status.figures;
  const buffer = status.buffer ?? {};
  const dropped = Object.values(buffer.dropped ?? {}).reduce((sum, n) => sum + n, 0);
  const live = (label, value, unit, hint, tone) => ({ label, value: value ?? "–", unit: value ? unit : "", hint, tone, old: !value });
  const fixed = (value, digits) => isNumber(value) ? value.toFixed(digits) : null;
  const figures = [
    live("α now", fixed(100 * (now.alpha ?? NaN), 1), "%", "accepted / tested", "alpha"),
    live("acceptance rate", fixed(100 * (now.acceptance_rate ?? NaN), 1), "%", "accepted / drafted"),
    live("acceptance length", fixed(now.acceptance_length, 2), "", "1 + accepted / drafts"),
    live("tokens/s", fixed(now.tokens_per_second, now.tokens_per_second < 100 ? 1 : 0), "", "all replicas"),
    live("TPOT", fixed(now.tpot_ms, 1), "ms", "per output token"),
    { label: "draft", value: version(status.version), hint: `serving, k ${isNumber(now.k) ? `= ${now.k}` : `up to ${status.k ?? "–"}`}` },
    { label: "replay buffer", value: count(buffer.num_traces), unit: "traces", hint: dropped ? `${count(dropped)} dropped` : `${count(buffer.num_holdout)} held out` },
    { label: "training", ...trainingState(status) },
  ];
  if (!changed("figures", figures)) return;
  document.getElementById("figures").replaceChildren(...figures.map(({ label, value, unit, hint, tone, old }) => {
    const shown = element("dd", { class: "value", title: value }, value);
    if (unit) shown.append(element("span", { class: "unit" }, unit));
    return element("div", { class: `figure${old ? " old" : ""}`, "data-tone": tone ?? "" }, element("dt", {}, label), shown, element("dd", { class: "hint" }, hint));
  }));
}

// ---- tables ----

function fill(id, rows, columns, nothing) {
  const body = document.getElementById(id);
  if (rows.length) body.replaceChildren(...rows);
  else body.replaceChildren(element("tr", {}, element("td", { class: "none", colspan: columns }, nothing)));
}

export function showReplicas(replicas, serving) {
  const lagging = replicas.filter((r) => r.lagging).length;
  const state = (r) => {
    if (r.lagging) return tag("warn", `lagging, wanted v${r.wanted}`);
    return r.version === serving ? tag("good", "up to date") : tag("info", `changing to v${r.wanted}`);
  };
  document.getElementById("replicas-count").textContent = `${replicas.length}` + (lagging ? `, ${lagging} lagging` : "");
  if (!changed("replicas", [replicas, serving])) return;
  fill("replicas", replicas.map((r) => element("tr", {},
    element("td", {}, r.replica),
    element("td", {}, version(r.version)),
    element("td", {}, state(r)),
    element("td", {}, count(r.num_running)),
    element("td", {}, `${r.k ?? "–"}`),
    element("td", { class: "mono" }, r.url),
    element("td", { class: "wrap" }, r.engine),
    element("td", {}, since(r.at)),
  )), 8, "No replica has reported yet. One appears here as soon as its engine is up.");
}

// ---- the control of speculation ----

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
  ]), 10, "No replica has reported what it speculates: k is fixed, or no request has come yet.");
  const probes = figures.some((f) => isNumber(f.num_probes)) ? figures.reduce((sum, f) => sum + (f.num_probes ?? 0), 0) : null;
  const place = document.getElementById("speculation-count");
  place.textContent = probes === null ? "" : `${count(probes)} probe${probes === 1 ? "" : "s"}`;
  place.title = "Times an unused draft was tried, to see whether it has become worth it";
  document.getElementById("anatomy").hidden = known.length === 0;
  showAcceptance("places", tally(figures, (f) => f.places.map((pair, i) => [`${i + 1}.`, pair])));
  showAcceptance("contexts", tally(figures, (f) => Object.entries(f.contexts).map(([name, pair]) => [`${name.replace(">=", "≥ ").replace("<", "< ")} tokens`, pair])));
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

const STATES = { serving: "good", pinned: "info", kept: "info", bad: "bad" };

export function showDrafts(drafts) {
  if (!changed("drafts", drafts)) return;
  document.getElementById("drafts-count").textContent = drafts.length ? `${drafts.length} in the store` : "";
  const newest = [...drafts].sort((a, b) => b.version - a.version);
  fill("drafts", newest.map((draft) => {
    const states = Object.keys(STATES).filter((state) => draft[state]).map((state) => tag(STATES[state], state === "bad" ? "bad, rolled back" : state));
    if (draft.bad_reason) states.forEach((shown) => { shown.title = draft.bad_reason; });
    const report = draft.eval;
    const served = isNumber(draft.served_alpha) ? `, served ${percent(draft.served_alpha)}` : "";
    const judged = (report ? `${percent(report.alpha_base)} → ${percent(report.alpha_candidate)}` : "the first draft") + served;
    const gain = report ? `${points(report.diff)} (${points(report.diff_low)} … ${points(report.diff_high)}) pt` : "–";
    return element("tr", {},
      element("td", {}, element("b", {}, version(draft.version))),
      element("td", {}, version(draft.parent)),
      element("td", {}, ...(states.length ? states : [tag("", "stored")])),
      element("td", report ? { title: `${report.num_traces} held-out requests, ${report.num_tokens} tokens` } : { class: "none" }, judged),
      element("td", {}, gain),
      element("td", {}, moment(draft.created_at)));
  }), 6, "No draft in the store yet. The one the service starts with becomes v1.");
}

const TONES = {
  published: "good", promoted: "good", resumed: "good", swapped: "info", rollback: "warn", lagging: "warn", paused: "warn", pinned: "info",
  unpinned: "info", kept: "info",
};

export function showEvents(events) {
  if (!changed("events", events)) return;
  const list = document.getElementById("events");
  const tone = (kind) => TONES[kind] ?? (/fail|error|lost|died/.test(kind) ? "bad" : "");
  if (!events.length) list.replaceChildren(element("li", { class: "none" }, "Nothing has happened yet. New drafts, refusals with their reason, rollbacks and failed swaps are listed here."));
  else list.replaceChildren(...events.map((event) => element("li", {}, moment(event.at), tag(tone(event.kind), `${event.kind}`.replaceAll("_", " ")), element("span", { class: "text" }, event.text))));
}

// ---- states of the page ----

/** Shown over the charts until the first figures come: what will appear, and a first request to paste. */
export function showEmpty(status, isEmpty, range) {
  const place = document.getElementById("empty");
  place.hidden = !isEmpty;
  document.getElementById("charts").classList.toggle("is-empty", isEmpty);
  const replica = status.replicas?.[0];
  if (!isEmpty || !changed("empty", [replica?.url, status.served_model_name, range])) return;
  const title = status.buffer?.num_put ? `No traffic in the last ${range}` : "No traffic yet";
  const children = [element("strong", {}, title)];
  if (replica) {
    children.push(element("p", {}, "Acceptance and speed appear here a second after the first answer. Send a request:"));
    const body = JSON.stringify({ model: status.served_model_name || "MODEL", prompt: "Once upon a time", max_tokens: 64 });
    const quoted = body.replaceAll("'", "'\\''");
    children.push(element("pre", {}, `curl ${replica.url}/v1/completions -H 'Content-Type: application/json' \\\n  -d '${quoted}'`));
  } else {
    children.push(element("p", {}, "The engine is still starting. Acceptance and speed appear here a second after the first answer; how to send a request is shown once it is up."));
  }
  place.replaceChildren(...children);
}

export function showLive(state, text) {
  document.getElementById("live").dataset.state = state;
  document.body.classList.toggle("is-down", state === "down" || state === "stale");
  document.getElementById("live-text").textContent = text;
}

export function showBanner(text, isSoft = false) {
  const banner = document.getElementById("banner");
  banner.hidden = !text;
  banner.classList.toggle("soft", isSoft);
  if (text && banner.textContent !== text) banner.textContent = text;
}
