// What happened, newest first: filtered, and each event with an address of its own.

import { changed, element, moment, tag } from "./dom.js";
import { chosen, linkWith } from "./state.js";

const TONES = {
  published: "good", promoted: "good", recalled: "good", resumed: "good", trainer_back: "good", replica_back: "good", learns: "good", swapped: "info", rolled_back: "warn", rolled_out: "good", canary_moved: "warn", lagging: "warn",
  paused: "warn", discarded: "warn", alarm: "bad", pinned: "info", unpinned: "info", kept: "info",
};
let scrolledTo = ""; // the event of the address, once it was brought into view

const isProblem = (kind) => /fail|error|lost|died/.test(kind) || ["alarm", "lagging", "rolled_back", "canary_moved", "discarded"].includes(kind);
const GROUPS = {
  all: () => true,
  problems: isProblem,
  learning: (kind) => /^(published|refused|discarded|publish_failed|recalled|rests|learns|trainer_)/.test(kind),
  serving: (kind) => /^(swap|lagging|rolled_|canary_|rollback_|alarm|stays|steps|replica_|scaled)/.test(kind),
  hand: (kind) => ["paused", "resumed", "promoted", "pinned", "unpinned", "kept", "purged"].includes(kind),
};

export function showEvents(events) {
  const group = chosen("events"), wanted = chosen("event");
  if (!changed("events", [events, group, wanted])) return;
  const list = document.getElementById("events");
  const shown = events.filter((event) => GROUPS[group](event.kind) || `${event.at}` === wanted);
  document.getElementById("events-count").textContent = group === "all" ? "" : `${shown.length} of the newest ${events.length}`;
  if (!shown.length) {
    const nothing = events.length ? "None of the newest events is of this kind." : "Nothing has happened yet. New drafts, refusals with their reason, rollbacks and failed swaps are listed here.";
    return list.replaceChildren(element("li", { class: "none" }, nothing));
  }
  if (!wanted) scrolledTo = "";
  list.replaceChildren(...shown.map((event) => {
    const link = element("a", { href: linkWith("event", event.at), title: "A link to this event" }, moment(event.at));
    const isWanted = `${event.at}` === wanted;
    const tone = TONES[event.kind] ?? (isProblem(event.kind) ? "bad" : "");
    const item = element("li", isWanted ? { class: "wanted", "aria-current": "true" } : {}, link, tag(tone, `${event.kind}`.replaceAll("_", " ")), element("span", { class: "text" }, event.text));
    if (isWanted && scrolledTo !== wanted) {
      scrolledTo = wanted;
      requestAnimationFrame(() => item.scrollIntoView({ block: "nearest" }));
    }
    return item;
  }));
}
