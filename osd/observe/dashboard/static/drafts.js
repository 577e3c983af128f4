// The releases: which there are, two side by side, and, with the admin token, which one serves.

import { changed, count, duration, element, fill, isNumber, moment, percent, points, tag, version } from "./dom.js";
import { choose, chosen } from "./state.js";

const TIMEOUT_MS = 120000; // of a change: what is under way ends first, and one that is given up comes all the same
const STATES = { serving: "good", pinned: "info", kept: "info", bad: "bad" };

export function showDrafts(drafts) {
  if (!changed("drafts", [drafts, chosen("compare")])) return;
  document.getElementById("drafts-count").textContent = drafts.length ? `${drafts.length} in the store` : "";
  const newest = [...drafts].sort((a, b) => b.version - a.version);
  fill("drafts", newest.map(row), 6, "No draft in the store yet. The one the service starts with becomes v1.");
  showChoice(newest);
  showComparison(newest);
  offerVersions(newest);
}

function row(draft) {
  const states = Object.keys(STATES).filter((state) => draft[state]).map((state) => tag(STATES[state], state === "bad" ? "bad, rolled back" : state));
  if (draft.bad_reason) states.forEach((shown) => { shown.title = draft.bad_reason; });
  const report = draft.eval;
  return element("tr", {},
    element("td", {}, element("b", {}, version(draft.version))),
    element("td", {}, version(draft.parent)),
    element("td", {}, ...(states.length ? states : [tag("", "stored")])),
    element("td", report ? { class: "wrap", title: `${report.num_traces} held-out requests, ${report.num_tokens} tokens` } : { class: "none" }, judged(draft)),
    element("td", { class: "wrap" }, gain(report)),
    element("td", {}, moment(draft.created_at)));
}

function judged({ eval: report, served_alpha: served }) {
  const text = report ? `${percent(report.alpha_base)} → ${percent(report.alpha_candidate)}` : "the first draft";
  return isNumber(served) ? `${text}, served ${percent(served)}` : text;
}

const gain = (report) => report ? `${points(report.diff)} (${points(report.diff_low)} … ${points(report.diff_high)}) pt` : "–";

// ---- two side by side ----

function pair(drafts) {
  const versions = drafts.map((draft) => draft.version);
  const [first, second] = chosen("compare").split("-").map(Number);
  const serving = drafts.find((draft) => draft.serving)?.version ?? versions[0];
  const other = drafts.find((draft) => draft.version === serving)?.parent;
  return [versions.includes(first) ? first : versions.includes(other) ? other : versions.at(-1), versions.includes(second) ? second : serving];
}

/** The versions to choose from. They stay what they are while they are the same: somebody may be choosing. */
function offer(place, drafts) {
  if (!changed(place.id, drafts.map((draft) => draft.version))) return false;
  place.replaceChildren(...drafts.map((draft) => element("option", { value: draft.version }, version(draft.version))));
  return true;
}

function showChoice(drafts) {
  const [first, second] = pair(drafts);
  for (const [id, selected] of [["compare-first", first], ["compare-second", second]]) {
    const place = document.getElementById(id);
    offer(place, drafts);
    if (place.value !== `${selected}`) place.value = `${selected}`;
  }
}

for (const id of ["compare-first", "compare-second"]) {
  document.getElementById(id).addEventListener("change", () => {
    choose("compare", ["compare-first", "compare-second"].map((place) => document.getElementById(place).value).join("-"));
  });
}

const FACTS = [
  ["made from", "The draft that training began with", (d) => version(d.parent)],
  ["kind", "full = all weights were trained, lora = an adapter, merged when it was done", (d) => d.num_steps ? d.kind : "–"],
  ["made", "", (d) => moment(d.created_at)],
  ["training", "Optimizer steps, rows of target distributions learnt from (replayed ones included), and the time they took", (d) => d.num_steps ? `${count(d.num_steps)} steps, ${count(d.num_tokens)} rows, ${duration(d.seconds)}` : "–"],
  ["loss", "Training loss of the first step and of the last", (d) => d.num_steps && isNumber(d.loss_first) ? `${d.loss_first.toFixed(3)} → ${d.loss_last.toFixed(3)}` : "–"],
  ["held-out α", "Of the draft it came from, and its own, on the same held-out requests", (d) => d.eval ? `${percent(d.eval.alpha_base)} → ${percent(d.eval.alpha_candidate)}` : "–"],
  ["gain", "Its own α less that of the draft it came from, with the interval the gate judged by", (d) => gain(d.eval)],
  ["served α", "accepted / tested draft tokens of live traffic", (d) => isNumber(d.served_alpha) ? `${percent(d.served_alpha)} of ${count(d.served_tested)} tested` : "–"],
];

const SUCCESS = "Share of the held-out tokens that are among the draft's 1, 2, … 5 likeliest: what a token tree so wide would hold";
const success = (shares) => shares?.length ? shares.map(percent).join(" ") : "–";

function showComparison(drafts) {
  const shown = pair(drafts).map((wanted) => drafts.find((draft) => draft.version === wanted));
  if (shown.some((draft) => !draft)) return fill("comparison", [], 3, "Nothing to compare yet.");
  const line = (label, title, cell) => element("tr", {}, element("th", { scope: "row", title }, label), ...shown.map((draft) => element("td", {}, cell(draft))));
  const places = Math.max(...shown.map((draft) => draft.eval?.alpha_candidate_per_pos.length ?? 0));
  const classes = [...new Set(shown.flatMap((draft) => Object.keys(draft.eval?.classes ?? {})))].sort();
  fill("comparison", [
    ...FACTS.map(([label, title, cell]) => line(label, title, cell)),
    ...Array.from({ length: places }, (_, i) => line(`α at position ${i + 1}`, "Held-out α at this position of the draft", (d) => percent(d.eval?.alpha_candidate_per_pos[i]))),
    line("among the likeliest 1 to 5", SUCCESS, (d) => success(d.eval?.success_candidate)),
    ...classes.map((name) => line(`α of ${name || "unlabelled"}`, "Held-out α of this class of traffic: label, or cluster of unlabelled prompts", (d) => {
      const report = d.eval?.classes[name];
      return report ? `${percent(report.alpha_base)} → ${percent(report.alpha_candidate)} (${count(report.num_traces)} requests)` : "–";
    })),
    ...classes.map((name) => line(`likeliest 1 to 5, ${name || "unlabelled"}`, SUCCESS, (d) => success(d.eval?.classes[name]?.success_candidate))),
  ], 3, "Nothing to compare yet.");
  document.getElementById("comparison-title").textContent = `v${shown[0].version} beside v${shown[1].version}`;
}

// ---- what an administrator may do ----

function offerVersions(drafts) {
  const place = document.getElementById("admin-version");
  const before = place.value;
  if (offer(place, drafts) && drafts.some((draft) => `${draft.version}` === before)) place.value = before;
}

const ASKED = {
  promote: (v) => `Serve v${v} from now on?`, pin: (v) => `Serve v${v}, and nothing newer, until it is unpinned?`, keep: (v) => `Never prune v${v}?`,
  rollback: () => "Serve the draft that the serving one was made from?", unpin: () => "Let newer drafts serve again?",
  pause: () => "Train and publish nothing until resumed?", resume: () => "Train and publish again?",
};

async function act(action) {
  const place = document.getElementById("admin-answer");
  const wanted = document.getElementById("admin-version").value;
  const token = document.getElementById("admin-token").value.trim();
  const takesVersion = ["promote", "pin", "keep"].includes(action);
  if (!token) return say("bad", "Give the admin token first: `osd serve` prints where it lies.");
  if (takesVersion && !wanted) return say("bad", "There is no draft in the store.");
  if (!confirm(ASKED[action](wanted))) return;
  try {
    const path = `osd/admin/${action}${takesVersion ? `?version=${wanted}` : ""}`;
    const response = await fetch(path, { method: "POST", headers: { authorization: `Bearer ${token}` }, signal: AbortSignal.timeout(TIMEOUT_MS) });
    const answer = await response.json().catch(() => ({}));
    say(response.ok ? "good" : "bad", response.ok ? `Done: ${action}${takesVersion ? ` v${wanted}` : ""}.` : answer.error ?? `It was answered ${response.status}.`);
  } catch (error) {
    say("bad", `No answer: ${error.message}`);
  }
  function say(tone, text) {
    place.className = `answer ${tone}`;
    place.textContent = text;
  }
}

for (const button of document.querySelectorAll("button[data-action]")) button.addEventListener("click", () => act(button.dataset.action));
