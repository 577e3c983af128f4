// The loop of the page: ask for status, history, drafts and events, show them, and say how fresh they are.

import { Charts } from "./charts.js";
import * as dom from "./dom.js";
import { showDrafts } from "./drafts.js";
import { showLoop } from "./loop.js";
import { showChanges, showSpeculation } from "./speculation.js";
import { RANGES, bindControls, chosen, onChoice } from "./state.js";
import { showEvents } from "./timeline.js";
import * as view from "./view.js";

const NUM_EVENTS = 200;
const POLL_MS = 1000;
const TIMEOUT_MS = 5000;
const HEARTBEAT_OLD = 15; // seconds without a heartbeat after which a replica's figures are called stale

const charts = new Charts();
let last = null; // the last complete answers, to draw another choice at once
let lastAnswer = null; // performance.now() of the last complete answer
let firstFailure = null; // of the first failed attempt since then
let failure = "";
let historyDue = 0;
let heard = { newest: null, at: null }; // the newest heartbeats, and when they came; null = before this page was opened

class NoAnswer extends Error {}
class Refusal extends Error {}

async function get(path) {
  const options = { signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" };
  const [response, text] = await fetch(path, options).then(async (r) => [r, await r.text()]).catch(() => { throw new NoAnswer(); });
  if (response.ok) return JSON.parse(text);
  throw new Refusal(errorIn(text) || `${path} answered ${response.status}`);
}

function errorIn(text) {
  try {
    return JSON.parse(text).error;
  } catch {
    return "";
  }
}

const whatIsShown = () => `${chosen("range")} ${chosen("by")}`;

/** History of the chosen range; over longer ranges a point lasts longer, so it is asked for less often. */
async function getHistory() {
  if (performance.now() < historyDue) return null;
  const asked = whatIsShown();
  const [seconds, bucket] = RANGES[chosen("range")];
  const path = `osd/history?since=-${seconds}&bucket=${bucket}&by=${chosen("by")}`;
  const history = await get(path);
  if (asked !== whatIsShown()) return null; // something else was chosen meanwhile
  document.getElementById("twin-history").href = path;
  historyDue = performance.now() + Math.min(500 * history.bucket, 10000) - POLL_MS / 2;
  return history;
}

async function refresh() {
  const asked = whatIsShown();
  const [status, history, drafts, events] = await Promise.all([get("osd/status"), getHistory(), get("osd/drafts"), get(`osd/events?limit=${NUM_EVENTS}`)]);
  last = { status, drafts, events };
  dom.setServerTime(status.now);
  view.showSubtitle(status);
  view.showHealth(status.problems ?? []);
  view.showFigures(status);
  view.showReplicas(status);
  showLoop(status, drafts, events);
  showSpeculation(status.replicas ?? []);
  showDrafts(drafts);
  showEvents(events);
  if (history && asked === whatIsShown()) {
    charts.update(history, drafts);
    showChanges(history.changes, (status.replicas ?? []).length > 1);
    view.showEmpty(status, history.series.at.length === 0 && Object.keys(status.figures).length === 0, chosen("range").replace(/(\d)([a-z])/, "$1 $2"));
  }
  return status;
}

async function poll() {
  try {
    const status = await refresh();
    lastAnswer = performance.now();
    firstFailure = null;
    showFreshness(status);
  } catch (error) {
    firstFailure ??= lastAnswer ?? performance.now();
    failure = told(error);
    historyDue = 0;
    showFailure();
  }
  dom.tick();
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

/** Seconds since a heartbeat came. The clocks of replicas may be wrong: what this page saw come is told by its own. */
function silence(status, replicas) {
  const newest = replicas.map((replica) => `${replica.replica} ${replica.at}`).join();
  if (newest !== heard.newest) heard = { newest, at: heard.newest === null ? null : performance.now() };
  return heard.at === null ? status.now - Math.max(0, ...replicas.map((replica) => replica.at)) : (performance.now() - heard.at) / 1000;
}

function showFreshness(status) {
  const replicas = status.replicas ?? [];
  const age = silence(status, replicas);
  const isStale = replicas.length > 0 && age > HEARTBEAT_OLD;
  view.showBanner(isStale ? `Stale: no replica has reported for ${dom.duration(age)}. The service answers, but the figures below are old.` : "", true);
  const isIdle = !isStale && Object.keys(status.figures).length === 0;
  view.showLive(isStale ? "stale" : "live", isStale ? "stale" : isIdle ? "live, no traffic" : "live");
}

/** What the service says is wrong, or that it answers what this page does not know; "" where it does not answer. */
function told(error) {
  if (error instanceof NoAnswer) return "";
  if (error instanceof Refusal) return `the service reports an error: ${error.message}`;
  return `what answers is not what this page knows, perhaps of another version: load it again (${error.message})`;
}

function showFailure() {
  const seconds = dom.duration((performance.now() - firstFailure) / 1000);
  const shown = lastAnswer === null ? "" : ` Shown is what was last seen, at ${dom.when((Date.now() - (performance.now() - lastAnswer)) / 1000)}.`;
  view.showBanner(failure ? `For ${seconds}, ${failure}.${shown}` : `Service unreachable for ${seconds}. Trying again every second.${shown}`);
  view.showLive("down", failure ? "error" : "unreachable");
}

bindControls();
onChoice((name) => {
  if (name === "range" || name === "by") {
    historyDue = 0;
    getHistory().then((answer) => answer && charts.update(answer), () => {});
  } else if (last) {
    showEvents(last.events);
    showDrafts(last.drafts);
  }
});

poll();
