// Three charts on one time axis: acceptance, speed, load. Drawn by uPlot from the columns of /osd/history.

const SYNC = "osd";
const NARROW = 600; // px of chart width under which it is drawn for a phone
const sideWidth = (width) => width < NARROW ? 44 : 54; // of every y axis, left and right: the three time axes line up

const percent = (value) => `${(100 * value).toFixed(1)} %`;
const figure = (digits, unit) => (value) => `${value.toFixed(value >= 100 ? 0 : digits)}${unit}`;

const CHARTS = [
  {
    name: "acceptance", height: [250, 210], labels: true,
    series: [
      { label: "α (accepted / tested)", color: "--alpha", value: (s) => s.alpha, show: percent, width: 2.25 },
      { label: "acceptance rate (accepted / drafted)", color: "--rate", value: (s) => s.acceptance_rate, show: percent, dash: [6, 4] },
    ],
    left: { range: () => [0, 1], text: (v) => `${Math.round(100 * v)} %` },
  },
  {
    name: "speed", height: [170, 160],
    series: [
      { label: "tokens/s", color: "--speed", value: (s) => s.tokens_per_second, show: figure(1, " tok/s"), width: 2.25 },
      { label: "TPOT (right axis)", color: "--tpot", value: (s) => s.tpot_ms, show: figure(1, " ms"), dash: [6, 4], right: true },
    ],
    left: { range: upFromZero, text: short },
    right: { range: upFromZero, text: (v) => `${short(v)} ms` },
  },
  {
    name: "load", height: [120, 120], time: true,
    series: [
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

/** The three charts; `update(history)` takes an answer of /osd/history. */
export class Charts {
  constructor() {
    this.plots = [];
    this.frame = { from: 0, to: 1, marks: [] };
    this.data = CHARTS.map((chart) => [[], ...chart.series.map(() => [])]);
    this.build();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
    new ResizeObserver(() => this.resize()).observe(document.getElementById("charts"));
  }

  build() {
    this.plots.forEach((plot) => plot.destroy());
    this.plots = CHARTS.map((chart, i) => {
      const place = document.getElementById(`chart-${chart.name}`);
      const plot = new uPlot(options(chart, this.frame, size(chart, place)), this.data[i], place);
      plot.legendValues = makeLegend(chart);
      return plot;
    });
    this.showValues(null);
    this.plots.forEach((plot) => { plot.onCursor = (index) => this.showValues(index); });
  }

  resize() {
    this.plots.forEach((plot, i) => plot.setSize(size(CHARTS[i], plot.root.parentElement)));
  }

  update(history) {
    const columns = withGaps(history.series, history.bucket);
    Object.assign(this.frame, { from: history.since, to: history.now, marks: history.marks, bucket: history.bucket });
    this.data = CHARTS.map((chart) => [columns.at, ...chart.series.map((s) => s.value(columns, history.bucket))]);
    this.plots.forEach((plot, i) => plot.setData(this.data[i]));
    this.showValues(this.plots[0].cursor.idx ?? null);
    this.describe();
  }

  /** Legend values under the cursor, or the latest ones. */
  showValues(index) {
    this.plots.forEach((plot, i) => CHARTS[i].series.forEach((series, j) => {
      const values = this.data[i][j + 1];
      const value = index === null ? values.findLast((v) => v !== null) : values[index];
      plot.legendValues[j].textContent = value === undefined || value === null ? "–" : series.show(value);
    }));
  }

  /** What the charts show, in words, for those who cannot see them. */
  describe() {
    CHARTS.forEach((chart, i) => {
      const parts = chart.series.map((series, j) => {
        const seen = this.data[i][j + 1].filter((v) => v !== null);
        return seen.length ? `${series.label}: ${series.show(seen[0])} at first, ${series.show(seen.at(-1))} now` : `${series.label}: no data`;
      });
      const versions = this.frame.marks.map((mark) => `v${mark.version}`).join(", ");
      const text = parts.join("; ") + (versions ? `; draft changes: ${versions}` : "");
      document.getElementById(`chart-${chart.name}`).setAttribute("aria-label", text);
    });
  }
}

function size(chart, place) {
  const width = Math.max(place.clientWidth, 240);
  return { width, height: chart.height[width < NARROW ? 1 : 0] };
}

function options(chart, frame, { width, height }) {
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
    series: [{}, ...chart.series.map(seriesOptions)],
    hooks: {
      draw: [(plot) => drawMarks(plot, frame.marks, chart.labels)],
      setCursor: [(plot) => plot.onCursor?.(plot.cursor.left < 0 ? null : plot.cursor.idx)],
    },
  };
}

function seriesOptions(series) {
  const stroke = color(series.color);
  return {
    label: series.label, stroke, width: series.width ?? 1.75, dash: series.dash, scale: series.right ? "right" : "y",
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

function clock(_, splits, __, ___, step) {
  const two = (n) => `${n}`.padStart(2, "0");
  return splits.map((at) => {
    const d = new Date(1000 * at);
    return `${two(d.getHours())}:${two(d.getMinutes())}` + (step < 60 ? `:${two(d.getSeconds())}` : "");
  });
}

/** A dashed line where the serving draft changed; its version on top, left out where it would cover a newer one. */
function drawMarks(plot, marks, labels) {
  const { ctx, bbox } = plot;
  const dpr = devicePixelRatio || 1;
  ctx.save();
  ctx.font = `600 ${11 * dpr}px ${color("--font")}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  let free = Infinity;
  for (const mark of [...marks].reverse()) {
    const x = Math.round(plot.valToPos(mark.at, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = color("--muted");
    ctx.lineWidth = dpr;
    ctx.setLineDash([4 * dpr, 4 * dpr]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    const text = `v${mark.version}`;
    const half = ctx.measureText(text).width / 2 + 6 * dpr;
    if (!labels || x + half > free) continue;
    free = x - half - 3 * dpr;
    ctx.setLineDash([]);
    ctx.fillStyle = color("--sunken");
    ctx.beginPath();
    ctx.roundRect(x - half, bbox.top - 20 * dpr, 2 * half, 17 * dpr, 4 * dpr);
    ctx.fill();
    ctx.fillStyle = color("--ink");
    ctx.fillText(text, x, bbox.top - 11 * dpr);
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

function makeLegend(chart) {
  const place = document.getElementById(`legend-${chart.name}`);
  const values = [];
  place.replaceChildren(...chart.series.map((series) => {
    const key = document.createElement("span");
    const swatch = document.createElement("span");
    const value = document.createElement("b");
    key.className = "key";
    swatch.className = `swatch${series.dash ? " dashed" : ""}${series.area ? " area" : ""}`;
    swatch.style[series.area ? "background" : "borderTopColor"] = color(series.color);
    key.append(swatch, series.label, value);
    values.push(value);
    return key;
  }));
  return values;
}
