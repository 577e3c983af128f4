// The loop as a picture: requests ─► rows ─► buffer ─► trainer ─► gate ─► releases ─► replicas, with what flows and what is lost.

import { ago, bytes, changed, count, duration, element, isNumber, percent, points, rate, version } from "./dom.js";

let before = null; // {at, rows, requests} of an earlier answer, to tell what flows now
let flows = { rows: null };

export function showLoop(status, drafts, events) {
  const replicas = status.replicas ?? [];
  const stages = [requests(status, replicas), rows(status, replicas), buffer(status), trainer(status), gate(status, events), releases(status, drafts), serving(status, replicas)];
  if (!changed("loop", stages)) return;
  document.getElementById("loop").replaceChildren(...stages.map(({ name, help, value, unit, lines, tone, flows: isFlowing }) => {
    const shown = element("p", { class: "value" }, value);
    if (unit) shown.append(element("span", { class: "unit" }, unit));
    return element("li", { class: `stage ${tone ?? ""}${isFlowing ? " flows" : ""}` },
      element("h3", { title: help }, name), shown,
      ...lines.filter(Boolean).map(([text, title, bad]) => element("p", { class: bad ? "line warn" : "line", title: title ?? "" }, text)));
  }));
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const total = (replicas, name) => sum(replicas.flatMap((replica) => Object.values(replica[name] ?? {})));
const listed = (counts) => Object.entries(counts).filter(([, n]) => n).sort((a, b) => b[1] - a[1]).map(([name, n]) => `${name} ${count(n)}`).join(", ");

/** reason -> how many, over all replicas. */
function merged(replicas, name) {
  const counts = {};
  for (const replica of replicas) for (const [reason, n] of Object.entries(replica[name] ?? {})) counts[reason] = (counts[reason] ?? 0) + n;
  return counts;
}

function requests({ figures }, replicas) {
  const perSecond = isNumber(figures.requests) ? figures.requests / figures.seconds : 0;
  const running = sum(replicas.map((replica) => replica.num_running));
  return {
    name: "Requests", help: "Finished requests / seconds, of the last 15 s (60 s when these saw none)", value: rate(perSecond), unit: "/s", flows: running > 0,
    lines: [[`${count(running)} running`, "In the engines now"], isNumber(figures.tokens_per_second) ? [`${rate(figures.tokens_per_second)} tokens/s`, "Output tokens / seconds with work, all replicas"] : null],
  };
}

function rows(status, replicas) {
  const now = total(replicas, "capture_rows");
  if (before === null || Math.abs(status.now - before.at) >= 2) { // the clock may be set back
    flows = { rows: before && now >= before.rows && status.now > before.at ? (now - before.rows) / (status.now - before.at) : null };
    before = { at: status.now, rows: now };
  }
  const skipped = merged(replicas, "capture_skipped");
  return {
    name: "Captured", help: "Rows (the target's distribution at one position) kept since the replicas started", value: count(now), unit: "rows", flows: flows.rows > 0,
    lines: [
      isNumber(flows.rows) ? [`${rate(flows.rows)} rows/s`, "Rows now - rows before / seconds between"] : null,
      [listed(merged(replicas, "capture_rows")) || "none yet", "By kind: rejected and accepted draft tokens, and plain ones that nobody drafted"],
      sum(Object.values(skipped)) ? [`skipped: ${listed(skipped)}`, "Requests, steps or traces left out, by reason"] : null,
    ],
  };
}

function buffer({ buffer: stats, redis, replicas }) {
  const dropped = merged([...(replicas ?? []), { all: stats?.dropped ?? {} }].map((r) => ({ all: r.all ?? r.buffer_dropped })), "all");
  const isDropping = sum(Object.values(dropped)) > 0;
  return {
    name: "Replay buffer", help: "Traces (one request each) that training may draw from", value: count(stats?.num_traces), unit: "traces", tone: redis === "away" ? "bad" : "",
    lines: [
      redis === "away" ? ["Redis is away", "Traces are dropped until it is back", true] : [`${count(stats?.num_holdout)} held out`, "Kept for the gate; never trained on"],
      [`${bytes(stats?.num_bytes)}${stats?.oldest_at ? `, oldest ${duration(ago(stats.oldest_at))}` : ""}`, "Size in Redis, and age of the oldest trace"],
      [isDropping ? `dropped: ${listed(dropped)}` : "none dropped", "Traces that could not be stored or read, by reason", isDropping],
    ],
  };
}

function trainer(status) {
  const last = status.last_round;
  const isTraining = status.phase === "training";
  const [value, why] = status.training === false ? ["off", "trainer.enabled is false"]
    : status.trainer === "away" ? ["failing", "tried again by itself"]
    : status.paused ? ["paused", "by hand; `osd resume` ends it"]
    : isTraining ? ["training", status.phase_detail]
    : status.phase_detail?.startsWith("at rest") ? ["at rest", status.phase_detail.replace(/^at rest:? ?/, "")]
    : ["waiting", status.phase_detail || "for new traces"];
  return {
    name: "Trainer", help: "What it is doing, and why", value, flows: isTraining, tone: status.trainer === "away" ? "bad" : status.paused ? "warn" : "",
    lines: [[why, "Why"], ...(last ? lastRound(last) : [["no round yet", ""]]), ...payback(status.payback)],
  };
}

function payback(found) {
  if (!found) return [];
  const help = `A round takes ${found.taken_s.toFixed(1)} s from the engines, whose steps take ${found.slowdown.toFixed(2)} times as long meanwhile. Its draft is expected to save ${found.saved_s.toFixed(1)} s of the next ${duration(found.within_s)} (trainer.payback_seconds). Where that is less, training rests`;
  return [[`a round takes ${found.taken_s.toFixed(1)} s, may save ${found.saved_s.toFixed(1)} s`, help]];
}

function lastRound(last) {
  const speed = last.seconds > 0 ? `, ${rate(last.num_tokens / last.seconds)} rows/s` : "";
  return [
    last.num_steps ? [`loss ${last.loss_first.toFixed(2)} → ${last.loss_last.toFixed(2)}`, "Of the first and the last step of the last round"] : null,
    [last.discarded ? `discarded: ${last.discarded}` : `${count(last.num_tokens)} rows in ${duration(last.seconds)}${speed}`, "Of the last round", Boolean(last.discarded)],
  ];
}

function gate({ last_round: last }, events) {
  const verdict = events.find((event) => /^(published|refused|discarded|publish_failed)$/.test(event.kind));
  const report = last?.eval;
  return {
    name: "Gate", help: "A new draft serves only if it is proved better on held-out requests", value: verdict ? verdict.kind.replace("_", " ") : "–",
    tone: verdict?.kind === "published" ? "good" : verdict?.kind === "publish_failed" ? "bad" : "",
    lines: [
      report ? [`α ${percent(report.alpha_base)} → ${percent(report.alpha_candidate)}`, "Held-out α of the draft before, and of the new one"] : null,
      report ? [`${points(report.diff)} (${points(report.diff_low)} … ${points(report.diff_high)}) pt`, "The gain with its interval, whose lower end must lie above gate.min_gain"] : null,
      verdict ? [`${duration(ago(verdict.at))} ago`, verdict.text] : ["nothing judged yet", ""],
    ],
  };
}

function releases(status, drafts) {
  const isOff = isNumber(status.predicted_alpha) && isNumber(status.served_alpha);
  return {
    name: "Release", help: "The draft every replica is to serve", value: version(status.version), tone: status.alarm ? "bad" : status.pinned ? "warn" : "",
    lines: [
      [`${count(drafts.length)} in the store${status.pinned ? `, pinned v${status.pinned}` : ""}`, "Releases on disk"],
      isOff ? [`α ${percent(status.predicted_alpha)} predicted, ${percent(status.served_alpha)} served`, "By the gate's replay, and accepted / tested of live traffic"] : null,
      [`${count(status.num_swaps)} swaps, ${count(status.num_rollbacks)} rollbacks`, "In the history kept"],
    ],
  };
}

function serving(status, replicas) {
  const lagging = replicas.filter((replica) => replica.lagging);
  return {
    name: "Replicas", help: "Engines that serve, and the draft each has", value: count(replicas.length), tone: replicas.length ? (lagging.length ? "warn" : "") : "bad",
    lines: [
      [replicas.length ? [...new Set(replicas.map((replica) => version(replica.version)))].join(", ") : "none alive", "Drafts being served", !replicas.length],
      [lagging.length ? `${lagging.map((replica) => replica.replica).join(", ")} lagging` : replicas.length ? "all in step" : "", "Whether each serves the draft it should", lagging.length > 0],
    ],
  };
}
