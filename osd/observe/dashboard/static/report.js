// The charts of a report (osd/observe/report_page.py): each figure carries its data as JSON. Inlined there; the dashboard does not load it.

(() => {
  const SIDE = 54; // px of every y axis, left and right: charts under each other line up
  const TOP = 34; // px for the names of marks: changes of traffic above those of the draft
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const font = () => `11px ${color("--font")}`;
  const lineColor = (line, i) => color(line.color || `--line-${i % 8 + 1}`);
  const isDashed = (line, i) => line.dashed || i >= 8;
  const short = (value) => `${Math.round(1000 * value) / 1000}`;
  const shown = (value, line) => value === undefined || value === null ? "–" : `${value.toFixed(line.digits)}${line.unit}`;

  function element(tag, name, ...children) {
    const made = document.createElement(tag);
    made.className = name;
    made.append(...children);
    return made;
  }

  function legend(figure, chart) {
    const values = [{}, ...chart.lines].map(() => document.createElement("b"));
    const keys = chart.lines.map((line, i) => {
      const swatch = element("span", `swatch${isDashed(line, i) ? " dashed" : ""}`);
      swatch.style.borderTopColor = lineColor(line, i);
      return element("span", "key", swatch, line.label + (line.right ? " (right axis)" : ""), values[i + 1]);
    });
    figure.querySelector(".legend").replaceChildren(...keys, element("span", "key", values[0]));
    return (index) => {
      values[0].textContent = index === null ? "" : `${short(chart.x[index])} ${chart.x_label}${chart.notes.length ? `, ${chart.notes[index]}` : ""}`;
      chart.lines.forEach((line, i) => { values[i + 1].textContent = shown(index === null ? line.values.findLast((v) => v !== null) : line.values[index], line); });
    };
  }

  function drawMarks(plot, marks) {
    const { ctx, bbox } = plot, dpr = devicePixelRatio || 1;
    const free = { shift: 0, swap: 0 };
    ctx.save();
    ctx.font = `${11 * dpr}px ${color("--font")}`;
    ctx.textAlign = "center";
    ctx.lineWidth = dpr;
    for (const mark of marks) {
      const x = Math.round(plot.valToPos(mark.at, "x", true)), isShift = mark.kind === "shift";
      ctx.strokeStyle = ctx.fillStyle = color(isShift ? "--bad" : "--muted");
      ctx.setLineDash(isShift ? [] : [4 * dpr, 4 * dpr]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const half = ctx.measureText(mark.label).width / 2 + 3 * dpr;
      if (x - half < free[mark.kind]) continue;
      free[mark.kind] = x + half;
      ctx.fillText(mark.label, x, bbox.top - (isShift ? 20 : 6) * dpr);
    }
    ctx.restore();
  }

  function options(chart, place, say) {
    const isDouble = chart.lines.some((line) => line.right);
    const axis = { stroke: color("--muted"), font: font(), labelFont: font(), labelSize: 18, grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false } };
    const range = chart.from_zero ? (_, low, high) => [0, high > 0 ? 1.1 * high : 1] : undefined;
    return {
      width: Math.max(place.clientWidth, 240), height: chart.height,
      padding: [chart.marks.length ? TOP : 10, isDouble ? 0 : SIDE, 0, 0],
      legend: { show: false },
      cursor: { ...(chart.group && { sync: { key: chart.group, setSeries: false } }), drag: { x: false, y: false }, y: false, points: { size: 6 } },
      scales: { x: { time: false }, y: { range }, right: { range } },
      axes: [
        { ...axis, size: 28, label: chart.x_label },
        { ...axis, size: SIDE, label: chart.y_label || undefined },
        ...(isDouble ? [{ ...axis, scale: "right", side: 1, size: SIDE, grid: { show: false } }] : []),
      ],
      series: [{}, ...chart.lines.map((line, i) => ({
        label: line.label, stroke: lineColor(line, i), width: 2, dash: isDashed(line, i) ? [6, 4] : undefined,
        scale: line.right ? "right" : "y", spanGaps: chart.span_gaps, points: { size: 4, fill: lineColor(line, i) },
      }))],
      hooks: {
        draw: [(plot) => drawMarks(plot, chart.marks)],
        setCursor: [(plot) => say(plot.cursor.left < 0 ? null : plot.cursor.idx ?? null)],
      },
    };
  }

  for (const figure of document.querySelectorAll(".report-chart")) {
    const chart = JSON.parse(figure.querySelector("script").textContent), place = figure.querySelector(".plot");
    let plot;
    const build = () => {
      plot?.destroy();
      const say = legend(figure, chart);
      plot = new uPlot(options(chart, place, say), [chart.x, ...chart.lines.map((line) => line.values)], place);
      say(null);
    };
    build();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
    new ResizeObserver(() => plot.setSize({ width: Math.max(place.clientWidth, 240), height: chart.height })).observe(place);
  }
})();
