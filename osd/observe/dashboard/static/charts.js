// Six charts on one time axis: acceptance, tokens by source, speed, gain, parts of a step, load. Drawn by uPlot from the columns of /osd/history.

import { day } from "./dom.js";
import { Marks, tell } from "./marks.js";
import { smooth } from "./smoothing.js";
import { chosen, onChoice } from "./state.js";

const SYNC = "osd";
const NARROW = 600; // px of chart width under which it is drawn for a phone
const sideWidth = (width) => width < NARROW ? 44 : 54; // of every y axis, left and right: the time axes line up

const percent = (value) => `${(100 * value).toFixed(1)} %`;
const figure = (digits, unit) => (value) => `${value.toFixed(value >= 100 ? 0 : digits)}${unit}`;

const METRICS = {
  alpha: { name: "α (accepted / tested)", color: "--alpha", show: percent },
  acceptance_rate: { name: "acceptance rate (accepted / drafted)", color: "--rate", show: percent },
  acceptance_length: { name: "acceptance length (1 + accepted / drafts)", color: "--speed", show: figure(2, "") },
};
const LINE_COLORS = 8; // --line-1 ... in the style sheet

/** The lines of the acceptance chart for what is chosen and what the history has. */
function acceptanceSeries(history) {
  const metric = chosen("metric"), { name, color: tone, show } = METRICS[metric];
  const lines = Object.entries(history.lines ?? {});
  if (!chosen("by") || !lines.length) {
    return [
      ...(chosen("raw") === "1" ? [{ label: "single points", color: tone, value: (s) => s[metric], show, dots: true }] : []),
      { label: `${name}, smoothed`, color: tone, value: (s) => smooth(s[metric], s.tested), show, width: 2.25 },
    ];
  }
  const prefix = { class: "", replica: "", position: "position " }[chosen("by")] ?? "";
  return lines.map(([line], i) => ({
    label: `${prefix}${line}`, color: `--line-${i % LINE_COLORS + 1}`, value: (s) => smooth(s[`line ${line}`] ?? [], null), show, width: 1.75, dash: i >= LINE_COLORS ? [6, 4] : undefined,
  }));
}

/** What was measured holds until it is measured again. */
function kept(values) {
  let last = null;
  return values.map((value) => (last = value ?? last));
}

const PARTS = [["other", "--load"], ["sample", "--speed"], ["draft", "--rate"], ["verify", "--alpha"]]; // from the top of the stack down

const SPLIT_S = 15; // Replicas report the split every few seconds, and the history keeps it in slots of ten

/** What was measured holds for so many rows. */
function held(values, rows) {
  let last = null, left = 0;
  return values.map((value) => {
    left = value === null ? left - 1 : rows;
    last = value ?? (left > 0 ? last : null);
    return last;
  });
}

/** A step's parts on top of each other; the legend tells each one's own share. */
function stackedParts() {
  const share = (s, part) => s[`share_${part}`] ?? [];
  return PARTS.map(([part, tone], i) => ({
    label: part, color: tone, told: (s) => share(s, part), show: (v) => `${Math.round(100 * v)} %`, width: 1, area: i === PARTS.length - 1,
    value: (s, bucket) => held(s.at.map((_, row) => PARTS.slice(i).reduce((sum, [name]) => sum + (share(s, name)[row] ?? NaN), 0)).map((v) => Number.isNaN(v) ? null : v), SPLIT_S / bucket),
  }));
}

const SOURCES = [["memory", "--memory"], ["draft", "--rate"], ["target", "--load"]]; // from the top of the stack down

/** Tokens that a step of a request yields, by who brought them, on top of each other; the legend tells each one's own, and its share. */
function stackedSources() {
  const perStep = (s, source) => smooth((s[`tokens_${source}`] ?? []).map((n, row) => s.steps[row] ? n / s.steps[row] : null), null);
  const sum = (columns, row) => columns.reduce((total, column) => total + column[row], 0);
  const stacked = (columns) => columns[0].map((value, row) => value === null ? null : sum(columns, row));
  const withShare = (s, source) => {
    const all = SOURCES.map(([name]) => perStep(s, name));
    return perStep(s, source).map((value, row) => value === null ? null : [value, value / (sum(all, row) || 1)]);
  };
  return SOURCES.map(([source, tone], i) => ({
    label: source, color: tone, width: 1, area: i === SOURCES.length - 1, show: ([tokens, share]) => `${tokens.toFixed(2)} (${Math.round(100 * share)} %)`,
    value: (s) => stacked(SOURCES.slice(i).map(([name]) => perStep(s, name))), told: (s) => withShare(s, source),
  }));
}

const isLength = () => chosen("metric") === "acceptance_length";

const CHARTS = [
  {
    name: "acceptance", height: [250, 210], labels: true,
    series: acceptanceSeries,
    left: { range: (_, low, high) => isLength() ? [1, Math.max(2, 1.1 * (high ?? 1))] : [0, 1], text: (v) => isLength() ? short(v) : `${Math.round(100 * v)} %` },
  },
  {
    name: "sources", height: [120, 120],
    series: stackedSources,
    bands: SOURCES.slice(0, -1).map(([, tone], i) => ({ series: [i + 1, i + 2], tone })),
    left: { range: (_, low, high) => [0, Math.max(2, 1.1 * (high ?? 1))], text: short },
  },
  {
    name: "speed", height: [160, 150],
    series: () => [
      { label: "tokens/s", color: "--speed", value: (s) => s.tokens_per_second, show: figure(1, " tok/s"), width: 2.25 },
      { label: "TPOT (right axis)", color: "--tpot", value: (s) => s.tpot_ms, show: figure(1, " ms"), dash: [6, 4], right: true },
    ],
    left: { range: upFromZero, text: short },
    right: { range: upFromZero, text: (v) => `${short(v)} ms` },
  },
  {
    name: "gain", height: [120, 120],
    series: () => [
      { label: "net speed-up, measured", color: "--net", value: (s) => kept(s.net_ratio), show: figure(2, "×"), width: 2.25 },
      { label: "from", color: "--net", value: (s) => kept(s.net_low), show: figure(2, "×"), faint: true },
      { label: "to (95 % interval)", color: "--net", value: (s) => kept(s.net_high), show: figure(2, "×"), faint: true },
    ],
    bands: [{ series: [3, 2], tone: "--net" }],
    left: { range: (_, low, high) => [0, Math.max(1.5, 1.15 * (high ?? 1))], text: (v) => `${short(v)}×` },
  },
  {
    name: "parts", height: [110, 110],
    series: stackedParts,
    bands: PARTS.slice(0, -1).map(([, tone], i) => ({ series: [i + 1, i + 2], tone })),
    left: { range: () => [0, 1], text: (v) => `${Math.round(100 * v)} %` },
  },
  {
    name: "load", height: [120, 120], time: true,
    series: () => [
      { label: "finished requests/s", color: "--load", value: (s, bucket) => s.requests.map((n) => n === null ? null : n / bucket), show: figure(2, "/s"), area: true },
      { label: "k (right axis)", color: "--k", value: (s) => s.k, show: (v) => Number.isInteger(v) ? `${v}` : v.toFixed(2), step: true, right: true },
    ],
    left: { range: upFromZero, text: short },
    right: { range: (_, low, high) => [0, Math.max(2, Math.ceil((high ?? 0) + 1))], space: 18, text: (v) => Number.isInteger(v) ? `${v}` : "" },
  },
];

function upFromZero(_, low, high) {
  return [0, high > 0 ? 1.15 * high : 1];
}

function short(value) {
  return value >= 10000 ? `${(value / 1000).toFixed(0)}k` : `${Math.round(100 * value) / 100}`;
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The charts; `update(history, drafts)` takes answers of /osd/history and /osd/drafts. */
export class Charts {
  constructor() {
    this.plots = [];
    this.history = { series: { at: [] }, lines: {}, bucket: 1 };
    this.drafts = [];
    this.frame = { from: 0, to: 1, marks: [] };
    this.marks = new Marks(document.getElementById("marks"), document.getElementById("mark-bubble"));
    this.build();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
    onChoice((name) => ["metric", "by", "raw"].includes(name) && this.build());
    new ResizeObserver(() => this.resize()).observe(document.getElementById("charts"));
  }

  build() {
    this.plots.forEach((plot) => plot.destroy());
    this.wasNarrow = isNarrow();
    this.series = CHARTS.map((chart) => chart.series(this.history));
    this.named = this.lineNames();
    this.compute();
    this.plots = CHARTS.map((chart, i) => {
      const place = document.getElementById(`chart-${chart.name}`);
      const plot = new uPlot(options(chart, this.series[i], this.frame, size(chart)), this.data[i], place);
      plot.legendValues = makeLegend(chart, this.series[i]);
      return plot;
    });
    this.showValues(null);
    this.plots.forEach((plot) => { plot.onCursor = (index) => this.showValues(index); });
    this.plots[0].onDraw = () => this.drawMarks();
    this.drawMarks();
  }

  lineNames() {
    return JSON.stringify([Object.keys(this.history.lines ?? {}), chosen("by"), chosen("metric")]);
  }

  compute() {
    const { series, lines, bucket } = this.history;
    const more = Object.entries(lines ?? {}).map(([name, line]) => [`line ${name}`, line[chosen("metric")]]);
    this.columns = withGaps({ ...series, ...Object.fromEntries(more) }, bucket);
    const isBlank = this.columns.at.length === 0;
    this.data = this.series.map((lines) => [this.columns.at, ...lines.map((line) => isBlank ? [] : line.value(this.columns, bucket))]);
    this.told = this.series.map((lines, i) => lines.map((line, j) => line.told && !isBlank ? line.told(this.columns) : this.data[i][j + 1]));
  }

  resize() {
    if (isNarrow() !== this.wasNarrow) return this.build();
    this.plots.forEach((plot, i) => plot.setSize(size(CHARTS[i])));
  }

  update(history, drafts) {
    this.history = history;
    this.drafts = drafts ?? this.drafts;
    Object.assign(this.frame, { from: history.since, to: history.now, marks: history.marks, bucket: history.bucket });
    if (this.lineNames() !== this.named) this.build();
    this.compute();
    this.plots.forEach((plot, i) => plot.setData(this.data[i]));
    this.showValues(this.plots[0].cursor.idx ?? null);
    const isSeen = (column, is) => (history.series[column] ?? []).some(is);
    for (const [name, isShown] of [
      ["sources", isSeen("tokens_draft", (n) => n > 0) || isSeen("tokens_memory", (n) => n > 0)],
      ["gain", isSeen("net_ratio", (v) => v !== null)],
      ["parts", isSeen("share_verify", (v) => v !== null)],
    ]) document.getElementById(`figure-${name}`).hidden = !isShown;
    this.describe();
  }

  drawMarks() {
    this.marks.draw(this.plots[0], this.frame.marks, (mark) => tell(mark, this.drafts));
  }

  /** Legend values under the cursor, or the latest ones. */
  showValues(index) {
    this.plots.forEach((plot, i) => this.series[i].forEach((series, j) => {
      const values = this.told[i][j];
      const value = index === null ? values.findLast((v) => v !== null) : values[index];
      plot.legendValues[j].textContent = value === undefined || value === null ? "–" : series.show(value);
    }));
  }

  /** What the charts show, in words, for those who cannot see them. */
  describe() {
    CHARTS.forEach((chart, i) => {
      const parts = this.series[i].map((series, j) => {
        const seen = this.told[i][j].filter((v) => v !== null);
        return seen.length ? `${series.label}: ${series.show(seen[0])} at first, ${series.show(seen.at(-1))} now` : `${series.label}: no data`;
      });
      const versions = this.frame.marks.map((mark) => `v${mark.version}`).join(", ");
      const text = parts.join("; ") + (versions ? `; draft changes: ${versions}` : "");
      document.getElementById(`chart-${chart.name}`).setAttribute("aria-label", text);
    });
  }
}

/** px of every chart, hidden or not. */
const fullWidth = () => Math.max(document.getElementById("charts").clientWidth, 240);
const isNarrow = () => fullWidth() < NARROW;

function size(chart) {
  return { width: fullWidth(), height: chart.height[isNarrow() ? 1 : 0] };
}

function options(chart, lines, frame, { width, height }) {
  const side = sideWidth(width);
  const axis = { stroke: color("--muted"), font: `11px ${color("--font")}`, grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false } };
  return {
    width, height,
    padding: [chart.labels ? 24 : 8, chart.right ? 0 : side, chart.time ? 0 : 6, 0],
    legend: { show: false },
    cursor: { sync: { key: SYNC, setSeries: false }, drag: { x: false, y: false }, y: false, points: { size: 6 } },
    scales: { x: { time: true, range: () => [frame.from, frame.to] }, y: { range: chart.left.range }, right: { range: chart.right?.range ?? upFromZero } },
    axes: [
      { ...axis, show: true, size: chart.time ? 30 : 0, space: width < NARROW ? 56 : 70, values: chart.time ? clock : (_, splits) => splits.map(() => "") },
      { ...axis, size: side, space: 34, gap: 6, values: (_, splits) => splits.map(chart.left.text) },
      ...(chart.right ? [{ ...axis, scale: "right", side: 1, size: side, space: chart.right.space ?? 34, gap: 6, grid: { show: false }, values: (_, splits) => splits.map(chart.right.text) }] : []),
    ],
    series: [{}, ...lines.map(seriesOptions)],
    bands: (chart.bands ?? []).map((band) => ({ series: band.series, fill: `${color(band.tone)}26` })),
    hooks: {
      draw: [(plot) => { drawMarks(plot, frame.marks); plot.onDraw?.(); }],
      setCursor: [(plot) => plot.onCursor?.(plot.cursor.left < 0 ? null : plot.cursor.idx)],
    },
  };
}

function seriesOptions(series) {
  const stroke = color(series.color);
  if (series.dots) return { label: series.label, stroke: `${stroke}66`, paths: () => null, points: { show: true, size: 4, width: 0, fill: `${stroke}66`, stroke: "transparent" } };
  return {
    label: series.label, stroke: series.faint ? `${stroke}59` : stroke, width: series.faint ? 1 : series.width ?? 1.75, dash: series.dash, scale: series.right ? "right" : "y",
    fill: series.area ? `${stroke}40` : undefined,
    paths: series.step ? uPlot.paths.stepped({ align: 1 }) : undefined,
    points: { size: 4, fill: stroke, filter: lonePoints },
  };
}

/** A single value between two gaps has no line: it is drawn as a point. */
function lonePoints(plot, index, isShown) {
  if (isShown) return null;
  const values = plot.data[index];
  const lone = [];
  values.forEach((value, i) => {
    if (value !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null) lone.push(i);
  });
  return lone.length ? lone : null;
}

/** Midnight is told as the day that begins. */
function clock(_, splits, __, ___, step) {
  const two = (n) => `${n}`.padStart(2, "0");
  return splits.map((at) => {
    const d = new Date(1000 * at);
    if (step >= 86400 || d.getHours() + d.getMinutes() + d.getSeconds() === 0) return day(d);
    return `${two(d.getHours())}:${two(d.getMinutes())}` + (step < 60 ? `:${two(d.getSeconds())}` : "");
  });
}

/** A dashed line where the serving draft changed; the buttons above the first chart name it. */
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const dpr = devicePixelRatio || 1;
  ctx.save();
  ctx.strokeStyle = color("--muted");
  ctx.lineWidth = dpr;
  ctx.setLineDash([4 * dpr, 4 * dpr]);
  for (const mark of marks) {
    const x = Math.round(plot.valToPos(mark.at, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

/** An empty row where nothing was seen for more than three buckets, so that no line is drawn across. */
function withGaps(series, bucket) {
  const names = Object.keys(series);
  const out = Object.fromEntries(names.map((name) => [name, []]));
  series.at.forEach((at, row) => {
    const before = series.at[row - 1];
    if (row && at - before > 3 * bucket) names.forEach((name) => out[name].push(name === "at" ? before + bucket : null));
    names.forEach((name) => out[name].push(series[name][row]));
  });
  return out;
}

function makeLegend(chart, lines) {
  const place = document.getElementById(`legend-${chart.name}`);
  const values = [];
  place.replaceChildren(...lines.map((series) => {
    const key = document.createElement("span");
    const swatch = document.createElement("span");
    const value = document.createElement("b");
    key.className = "key";
    swatch.className = `swatch${series.dash ? " dashed" : ""}${series.area ? " area" : ""}${series.dots ? " dots" : ""}${series.faint ? " faint" : ""}`;
    swatch.style[series.area || series.dots ? "background" : "borderTopColor"] = color(series.color);
    key.append(swatch, series.label, value);
    values.push(value);
    return key;
  }));
  return values;
}
