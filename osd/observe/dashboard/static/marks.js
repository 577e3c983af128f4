// The changes of the serving draft over a chart: each a button that tells, when it is pointed at or has the focus, what the draft is.

import { count, duration, element, isNumber, percent, points, when } from "./dom.js";

const GAP = 4; // px between two labels; an older one that would touch a newer one becomes a dot

/** Buttons for `marks` over `plot`; `details(mark)` gives the lines of its bubble. */
export class Marks {
  constructor(place, bubble) {
    this.place = place;
    this.bubble = bubble;
    this.shown = "";
  }

  draw(plot, marks, details) {
    const left = plot.bbox.left / devicePixelRatio, width = plot.bbox.width / devicePixelRatio;
    const seen = marks.map((mark) => ({ ...mark, x: left + plot.valToPos(mark.at, "x") })).filter(({ x }) => x >= left && x <= left + width);
    const names = seen.map((mark) => `${mark.version}@${mark.at}`).join();
    if (names !== this.shown) {
      const focused = document.activeElement?.dataset?.mark;
      this.place.replaceChildren(...seen.map((mark) => this.button(mark, details)));
      this.shown = names;
      [...this.place.children].find((button) => button.dataset.mark === focused)?.focus();
    }
    let free = Infinity;
    for (let i = seen.length - 1; i >= 0; i--) {
      const button = this.place.children[i];
      const half = (`v${seen[i].version}`.length * 8 + 10) / 2;
      const isDot = seen[i].x + half > free;
      button.classList.toggle("dot-only", isDot);
      const told = details(seen[i]).join("; ");
      if (button.getAttribute("aria-label") !== told) button.setAttribute("aria-label", told);
      button.style.left = `${seen[i].x}px`;
      free = seen[i].x - (isDot ? 4 : half) - GAP;
    }
  }

  button(mark, details) {
    const button = element("button", { type: "button", class: "mark", "data-mark": `${mark.version}@${mark.at}` }, `v${mark.version}`);
    const show = () => {
      this.bubble.replaceChildren(...details(mark).map((line, i) => element(i ? "p" : "strong", {}, line)));
      this.bubble.hidden = false;
      const room = this.place.clientWidth - this.bubble.offsetWidth;
      this.bubble.style.left = `${Math.max(0, Math.min(room, parseFloat(button.style.left) - this.bubble.offsetWidth / 2))}px`;
    };
    const hide = () => { this.bubble.hidden = true; };
    button.addEventListener("pointerenter", show);
    button.addEventListener("focus", show);
    button.addEventListener("pointerleave", hide);
    button.addEventListener("blur", hide);
    button.addEventListener("keydown", (event) => event.key === "Escape" && hide());
    return button;
  }
}

/** What is known of the draft that began to serve at a mark, in lines. */
export function tell(mark, drafts) {
  const draft = drafts.find((known) => known.version === mark.version);
  const lines = [`v${mark.version}, ${when(mark.at)}${mark.previous ? `, after v${mark.previous}` : ""}`];
  if (draft?.num_steps) lines.push(`${draft.kind === "lora" ? "LoRA" : "full"} training: ${count(draft.num_tokens)} rows, ${count(draft.num_steps)} steps, ${duration(draft.seconds)}`);
  if (!draft) lines.push("no longer in the store");
  const report = draft?.eval;
  if (report) lines.push(`gate: ${points(report.diff)} (${points(report.diff_low)} … ${points(report.diff_high)}) pt on ${count(report.num_traces)} held-out requests`);
  if (report || isNumber(draft?.served_alpha)) lines.push(`α ${percent(report?.alpha_candidate)} predicted, ${percent(draft.served_alpha)} served`);
  if (isNumber(mark.pause_s)) lines.push(`engine paused ${(1000 * mark.pause_s).toFixed(1)} ms${mark.proved ? ", weights read back and equal" : ""}`);
  if (draft?.bad) lines.push(`rolled back: ${draft.bad_reason}`);
  return lines;
}
