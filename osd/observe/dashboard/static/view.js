// The head of the page, its figures, its replicas, and the states it can be in.

import { changed, count, element, fill, isNumber, percent, since, tag, version } from "./dom.js";

export function showSubtitle(status) {
  if (!changed("subtitle", [status.deployment, status.target, status.draft])) return;
  const parts = [`deployment ${status.deployment}`];
  if (status.target) parts.push(`target ${status.target}`);
  if (status.draft) parts.push(`draft ${status.draft}`);
  document.getElementById("subtitle").textContent = parts.join(" · ");
  document.title = `${status.deployment} · online speculative distillation`;
}

/** The worst problem with its remedy, and the others below it; or that there is none. */
export function showHealth(problems) {
  if (!changed("health", problems)) return;
  const place = document.getElementById("health");
  place.dataset.tone = problems.length ? "bad" : "good";
  const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;
  const others = problems.slice(1).map((text) => element("li", {}, sentence(text)));
  place.replaceChildren(element("strong", {}, problems.length ? sentence(problems[0]) : "All is well."), ...(others.length ? [element("ul", {}, ...others)] : []));
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

// ---- replicas ----

export function showReplicas({ replicas = [], members = [], version: serving }) {
  const draining = new Set(members.filter((m) => m.state === "draining").map((m) => m.replica));
  const alive = new Set(replicas.map((r) => r.replica));
  const away = members.filter((m) => !alive.has(m.replica));
  const lagging = replicas.filter((r) => r.lagging).length;
  const state = (r) => {
    if (r.lagging) return tag("warn", `lagging, wanted v${r.wanted}`);
    if (draining.has(r.replica)) return tag("info", "draining");
    return r.version === serving ? tag("good", "up to date") : tag("info", `changing to v${r.wanted}`);
  };
  document.getElementById("replicas-count").textContent = `${replicas.length}` + (lagging ? `, ${lagging} lagging` : "") + (away.length ? `, ${away.length} not there` : "");
  if (!changed("replicas", [replicas, members, serving])) return;
  const rows = away.map((m) => element("tr", {},
    element("td", {}, m.replica),
    element("td", {}, "–"),
    element("td", {}, tag(m.why || m.is_lost ? "warn" : "info", m.state)),
    element("td", { class: "wrap", colspan: "4" }, m.why),
    element("td", {}, since(m.since)),
  ));
  fill("replicas", rows.concat(replicas.map((r) => element("tr", {},
    element("td", {}, r.replica),
    element("td", {}, version(r.version)),
    element("td", {}, state(r)),
    element("td", {}, count(r.num_running)),
    element("td", {}, `${r.k ?? "–"}`),
    element("td", { class: "mono" }, r.url),
    element("td", { class: "wrap" }, r.engine),
    element("td", {}, since(r.at)),
  ))), 8, "No replica has reported yet. One appears here as soon as its engine is up.");
}

// ---- states of the page ----

/** Shown over the charts until the first figures come: what will appear, and a first request to paste. */
export function showEmpty(status, isEmpty, range) {
  const place = document.getElementById("empty");
  place.hidden = !isEmpty;
  document.getElementById("charts").classList.toggle("is-empty", isEmpty);
  const replica = status.replicas?.[0];
  if (!isEmpty || !changed("empty", [status.url || replica?.url, status.served_model_name, range])) return;
  const title = status.buffer?.num_put ? `No traffic in the last ${range}` : "No traffic yet";
  const children = [element("strong", {}, title)];
  if (replica) {
    children.push(element("p", {}, "Acceptance and speed appear here a second after the first answer. Send a request:"));
    const body = JSON.stringify({ model: status.served_model_name || "MODEL", prompt: "Once upon a time", max_tokens: 64 });
    const quoted = body.replaceAll("'", "'\\''");
    children.push(element("pre", {}, `curl ${status.url || replica.url}/v1/completions -H 'Content-Type: application/json' \\\n  -d '${quoted}'`));
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
