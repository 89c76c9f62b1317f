// Curves (uPlot draws them), bars and areas (own SVG), and what all figures have: a title, a legend, files to save.

import { h, s, add, num, save, csv, shown } from "./dom.js";

const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3], [12, 4], [1, 2]];

/** Returns the value of a colour of the theme. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const series = (i) => ({ stroke: `c${i % 8}`, dash: DASHES[Math.floor(i / 8 + i) % DASHES.length] });

/** Returns the mean of each value and the `width - 1` values before it; missing ones are left out. */
export function smooth(values, width) {
  if (width < 2) return values;
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - width + 1), i + 1).filter((v) => v !== null);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}

function sample(i) {
  const { stroke, dash } = series(i);
  return s("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" },
    s("line", { x1: 0, x2: 22, y1: 4, y2: 4, "stroke-width": 2, stroke: colour(stroke), "stroke-dasharray": dash.join(" ") }));
}

/** Returns a figure around a body; `svg` and `rows` return what its buttons save. */
export function figure(title, body, { svg, rows, under } = {}) {
  const name = title.replace(/[^\w]+/g, "-").slice(0, 60);
  return h("figure", {},
    h("figcaption", {}, h("span", {}, title), h("span", { class: "spacer" }),
      svg && h("button", { type: "button", class: "small", title: "save the figure",
        onclick: () => save(`${name}.svg`, "image/svg+xml", svg()) }, "SVG"),
      rows && h("button", { type: "button", class: "small", title: "save its numbers",
        onclick: () => save(`${name}.csv`, "text/csv", csv(rows())) }, "CSV")),
    body, under);
}

/** What a bar of a colour looks like. Waiting is pale with an edge, so that it is told from work without its colour. */
export const painted = (paint) => ({ fill: `var(--${paint})`, ...(paint === "wait" ? { "fill-opacity": 0.3, stroke: "var(--wait)" } : {}) });

/** Returns a square of a colour, for a legend; it looks as its bars do. */
export const swatch = (paint) => s("svg", { viewBox: "0 0 13 13", class: "swatch", "aria-hidden": "true" },
  s("rect", { x: 0.5, y: 0.5, width: 12, height: 12, ...painted(paint) }));

const drawn = new Set();

/** Redraws all curves, because the width or the theme has changed. */
export function redraw() {
  for (const one of [...drawn]) {
    if (one.place.isConnected) one.draw();
    else { one.plot?.destroy(); drawn.delete(one); }
  }
}

/**
 * Returns a figure of curves.
 * lines: [{label, x, y, low, high, points}]; low and high are the ends of an interval.
 * given: {unit, time, bound, onpoint, height}
 * The figure has `update(lines)`, which draws the newer lines and returns whether it could.
 */
export function curves(title, lines, given = {}) {
  let xs, data, all, ends;
  const column = (line, name) => {
    const place = new Map(xs.map((x, i) => [x, i]));
    const values = new Array(xs.length).fill(null);
    line.x.forEach((x, i) => { if (place.has(x)) values[place.get(x)] = line[name][i] ?? null; });
    return values;
  };
  const take = (newer) => {
    lines = newer;
    xs = [...new Set(lines.flatMap((line) => line.x))].filter((x) => x !== null).sort((a, b) => a - b);
    data = [xs, ...lines.map((line) => column(line, "y"))];
    ends = lines.flatMap((line) => (line.low ? [...line.low, ...line.high] : []));
    all = data.slice(1).flat().concat(given.bound ?? [], ends).filter((value) => value !== null);
  };
  take(lines);
  // Until somebody points at a step, a line that the newest step lacks is read where it was last known.
  const reached = (values, at, pointed) => {
    if (values[at] !== null || (pointed !== null && pointed !== undefined)) return num(values[at]);
    const last = values.findLastIndex((value) => value !== null && !Number.isNaN(value));
    return last < 0 ? "—" : `${num(values[last])} (at ${given.time ? new Date(1000 * xs[last]).toLocaleTimeString("sv") : num(xs[last])})`;
  };
  const reading = h("div", { class: "keys-of", "aria-live": "off" });
  const box = h("div", { class: "plot" });
  const one = { place: box, plot: null, draw };
  const read = (i) => {
    reading.replaceChildren();
    const at = i === null || i === undefined ? xs.length - 1 : i;
    add(reading, [h("span", {}, `${given.time ? new Date(1000 * xs[at]).toLocaleTimeString("sv") : `${given.xname || "step"} ${num(xs[at])}`}`),
      lines.map((line, k) => h("span", {}, sample(k), `${line.label} ${reached(data[k + 1], at, i)}`))]);
  };
  function draw() {
    one.plot?.destroy();
    const width = Math.max(220, box.clientWidth || 400);
    const soft = colour("soft");
    const axis = { stroke: soft, grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") } };
    one.plot = new uPlot({
      width, height: given.height || 190, legend: { show: false }, cursor: { y: false, drag: { x: true, y: false } },
      scales: { x: { time: Boolean(given.time) },
        y: { range: (u, low, high) => {
          if (all.length && all.every((value) => value === all[0])) return [all[0] - Math.max(0.5, Math.abs(all[0]) / 10), all[0] + Math.max(0.5, Math.abs(all[0]) / 10)];
          if (given.bound !== undefined) return [Math.min(low, given.bound), 1.05 * Math.max(high, given.bound)];
          const [least, most] = ends.length ? [Math.min(low, ...all), Math.max(high, ...all)] : [low, high];
          return ends.length ? [least - 0.02 * (most - least), most + 0.02 * (most - least)] : uPlot.rangeNum(low, high, 0.1, true);
        } } },
      axes: [{ ...axis, size: 32 }, { ...axis, size: 52, values: (u, ticks) => ticks.map((tick) => num(tick)) }],
      series: [{}, ...lines.map((line, k) => ({
        label: line.label, stroke: colour(series(k).stroke), dash: series(k).dash, width: 1.6, spanGaps: true,
        points: { show: Boolean(line.points) || xs.length < 3, size: 6 } }))],
      hooks: {
        setCursor: [(u) => read(u.cursor.idx)],
        draw: [(u) => { intervals(u, lines, xs, column); boundLine(u, given.bound); }],
        ready: [(u) => {
          let down = 0;
          u.over.addEventListener("mousedown", (event) => { down = event.clientX; });
          u.over.addEventListener("click", (event) => {
            if (given.onpoint && Math.abs(event.clientX - down) < 4 && u.cursor.idx !== null) given.onpoint(xs[u.cursor.idx]);
          });
        }],
      },
    }, data, box);
    one.plot.root.setAttribute("role", "img");
    one.plot.root.setAttribute("aria-label", `${title}: the newest values stand below`);
  }
  if (!xs.length) return figure(title, h("p", { class: "soft" }, "— no number of it is in the run folder"));
  drawn.add(one);
  new ResizeObserver(() => { if (one.plot && Math.abs(one.plot.width - Math.max(220, box.clientWidth)) > 2) draw(); }).observe(box);
  requestAnimationFrame(() => { if (box.isConnected) draw(); });
  read(null);
  // New numbers of a figure that nobody sees are drawn once somebody does.
  let seen = true, late = false;
  const show = () => {
    late = false;
    const { plot } = one;
    if (plot) {
      const zoomed = plot.scales.x.min > plot.data[0][0] || plot.scales.x.max < plot.data[0].at(-1);
      plot.setData(data, !zoomed);
      if (zoomed) plot.redraw();
    }
    read(plot?.cursor.idx);
  };
  new IntersectionObserver(([entry]) => { seen = entry.isIntersecting; if (seen && late) show(); }).observe(box);
  const update = (newer) => {
    if (newer.length !== lines.length) return false;
    const before = data;
    take(newer);
    if (JSON.stringify(data) === JSON.stringify(before)) return true;
    if (seen) show();
    else late = true;
    return true;
  };
  if (given.onpoint) {
    box.tabIndex = 0;
    box.title = "click on a point, or press Enter for the newest, to see what was written there";
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter") given.onpoint(xs[one.plot?.cursor.idx ?? xs.length - 1]);
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        const idx = Math.min(xs.length - 1, Math.max(0, (one.plot.cursor.idx ?? xs.length - 1) + (event.key === "ArrowLeft" ? -1 : 1)));
        one.plot.setCursor({ left: one.plot.valToPos(xs[idx], "x"), top: 10 });
        event.preventDefault();
      }
    });
  }
  const made = figure(title, box, {
    under: reading,
    svg: () => curvesSvg(title, lines, xs, data, given),
    rows: () => [[given.time ? "time" : given.xname || "step", ...lines.map((line) => line.label)],
      ...xs.map((x, i) => [x, ...data.slice(1).map((y) => y[i])])],
  });
  return Object.assign(made, { update });
}

function intervals(u, lines, xs, column) {
  lines.forEach((line, k) => {
    if (!line.low) return;
    const low = column(line, "low");
    const high = column(line, "high");
    u.ctx.save();
    u.ctx.strokeStyle = colour(series(k).stroke);
    u.ctx.lineWidth = 1.5;
    xs.forEach((x, i) => {
      if (low[i] === null) return;
      const at = u.valToPos(x, "x", true);
      u.ctx.beginPath();
      u.ctx.moveTo(at, u.valToPos(low[i], "y", true));
      u.ctx.lineTo(at, u.valToPos(high[i], "y", true));
      u.ctx.stroke();
    });
    u.ctx.restore();
  });
}

function boundLine(u, bound) {
  if (bound === undefined || bound === null) return;
  const y = u.valToPos(bound, "y", true);
  u.ctx.save();
  u.ctx.strokeStyle = colour("alarm");
  u.ctx.setLineDash([4, 3]);
  u.ctx.beginPath();
  u.ctx.moveTo(u.bbox.left, y);
  u.ctx.lineTo(u.bbox.left + u.bbox.width, y);
  u.ctx.stroke();
  u.ctx.restore();
}

/** Returns the same curves as an SVG file. */
function curvesSvg(title, lines, xs, data, given) {
  const [width, height, left, base] = [720, 320, 60, 280];
  const all = data.slice(1).flat().filter((v) => v !== null).concat(given.bound ?? []);
  let [low, high] = [Math.min(...all), Math.max(...all)];
  if (low === high) [low, high] = [low - 1, high + 1];
  const [first, last] = [xs[0], xs.at(-1) === xs[0] ? xs[0] + 1 : xs.at(-1)];
  const px = (x) => left + (width - left - 10) * (x - first) / (last - first);
  const py = (y) => base - (base - 40) * (y - low) / (high - low);
  const parts = lines.map((line, k) => {
    const points = xs.map((x, i) => [x, data[k + 1][i]]).filter(([, y]) => y !== null);
    return s("polyline", { points: points.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" "), fill: "none",
      stroke: colour(series(k).stroke), "stroke-width": 1.6, "stroke-dasharray": series(k).dash.join(" ") });
  });
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((f) => [
    s("text", { x: left - 6, y: py(low + f * (high - low)) + 4, "text-anchor": "end" }, num(low + f * (high - low))),
    s("text", { x: px(first + f * (last - first)), y: base + 16, "text-anchor": "middle" }, num(first + f * (last - first)))]);
  const names = lines.map((line, k) => s("text", { x: left + 170 * (k % 4), y: base + 34 + 14 * Math.floor(k / 4), fill: colour(series(k).stroke) }, line.label));
  return svgFile(s("svg", { viewBox: `0 0 ${width} ${height + 14 * Math.ceil(lines.length / 4)}`, width, height },
    s("text", { x: left, y: 20, "font-weight": 600 }, title), s("line", { class: "axis", x1: left, x2: width - 10, y1: base, y2: base }),
    ticks.flat(), parts, names));
}

/** Returns an SVG element as the text of a file that stands alone. */
export function svgFile(svg) {
  const copy = svg.cloneNode(true);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  for (const part of copy.querySelectorAll("*")) {
    for (const name of ["fill", "stroke"]) {
      const value = part.getAttribute(name);
      if (value?.startsWith("var(")) part.setAttribute(name, colour(value.slice(6, -1)));
    }
  }
  const style = s("style", {}, `text{font:11px sans-serif;fill:${colour("front")}}.axis{stroke:${colour("line")}}.soft{fill:${colour("soft")}}`);
  copy.prepend(s("rect", { width: "100%", height: "100%", fill: colour("back") }));
  copy.prepend(style);
  return new XMLSerializer().serializeToString(copy);
}

/** Returns a figure from an SVG element. */
export function drawing(title, svg, rows, under) {
  svg.setAttribute("role", "group");
  svg.setAttribute("aria-label", title);
  const made = figure(title, svg, { svg: () => svgFile(svg), rows, under });
  if (svg.viewBox.baseVal.width > 600) made.classList.add("wide");
  return made;
}

/**
 * Returns a figure of bars. sets: [{label, counts}], drawn side by side; `link(i)` is the address that a bar opens.
 */
export function bars(title, labels, sets, { link, unit = "", names, marks = [], under } = {}) {
  const [width, height, left, base] = [480, 190, 46, 160];
  const most = Math.max(...sets.flatMap((set) => set.counts.map((n) => n ?? 0))) || 1;
  const each = (width - left - 6) / Math.max(1, labels.length);
  const thick = Math.max(1, (each - 2) / sets.length);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}` },
    [0, 0.5, 1].map((f) => [s("line", { class: "axis", x1: left, x2: width, y1: base - f * 140, y2: base - f * 140 }),
      s("text", { x: left - 5, y: base - f * 140 + 4, "text-anchor": "end" }, num(f * most, 3))]).flat());
  labels.forEach((label, i) => {
    sets.forEach((set, k) => {
      const tall = Math.max(set.counts[i] > 0 ? 1.5 : 0, 140 * (set.counts[i] ?? 0) / most);
      const bar = s("rect", { x: left + i * each + k * thick + 1, y: base - tall, width: thick, height: tall,
        fill: `var(--${k ? "c1" : set.colours?.[i] || "c0"})`, "fill-opacity": k ? 0.75 : 1 },
        s("title", {}, `${names ? names[i] : label}: ${set.label ? `${set.label} ` : ""}${num(set.counts[i])}${unit ? ` ${unit}` : ""}`));
      svg.append(link && set.counts[i] ? s("a", { href: link(i), "aria-label": `${names ? names[i] : label}: ${num(set.counts[i])}` }, bar) : bar);
    });
    const every = Math.ceil(labels.length / 9);
    if (i % every === 0) svg.append(s("text", { x: left + (i + 0.5) * each, y: base + 15, "text-anchor": "middle" }, shown(label)));
  });
  for (const mark of marks) {
    const x = left + mark.at * each;
    svg.append(s("line", { x1: x, x2: x, y1: 6, y2: base, stroke: "var(--alarm)", "stroke-dasharray": "4 3" }),
      s("text", { x: x + 4, y: 14 }, mark.label));
  }
  const legend = sets.length > 1 ? h("div", { class: "keys-of" }, sets.map((set, k) => h("span", {}, swatch(k ? "c1" : "c0"), set.label))) : null;
  const made = drawing(title, svg, () => [["", ...sets.map((set) => set.label || unit || "count")],
    ...labels.map((label, i) => [names ? names[i] : label, ...sets.map((set) => set.counts[i])])], [legend, under]);
  made.classList.add("narrow");
  return made;
}

/** Returns a figure of areas on top of each other. parts: [{label, y}]. */
export function areas(title, xs, parts, xname = "step") {
  const [width, height, left, base] = [720, 240, 62, 205];
  const sums = xs.map((_, i) => parts.reduce((sum, part) => sum + (part.y[i] ?? 0), 0));
  const most = Math.max(1, ...sums);
  const px = (i) => left + (width - left - 8) * i / Math.max(1, xs.length - 1);
  const below = xs.map(() => 0);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}` });
  parts.forEach((part, k) => {
    const lower = below.map((v, i) => `${px(i).toFixed(1)},${(base - 190 * v / most).toFixed(1)}`);
    part.y.forEach((v, i) => { below[i] += v ?? 0; });
    const upper = below.map((v, i) => `${px(i).toFixed(1)},${(base - 190 * v / most).toFixed(1)}`);
    svg.append(s("polygon", { points: [...upper, ...lower.reverse()].join(" "), fill: `var(--c${k % 8})`, "fill-opacity": k > 7 ? 0.6 : 0.85,
      stroke: "var(--back)", "stroke-width": 0.8 }, s("title", {}, part.label)));
  });
  for (const f of [0, 0.5, 1]) {
    svg.append(s("text", { x: left - 5, y: base - 190 * f + 4, "text-anchor": "end" }, num(f * most, 3)));
    svg.append(s("text", { x: px(f * (xs.length - 1)), y: base + 16, "text-anchor": f === 1 ? "end" : f ? "middle" : "start" }, `${xname} ${num(xs[Math.round(f * (xs.length - 1))])}`));
  }
  return drawing(title, svg, () => [[xname, ...parts.map((part) => part.label)], ...xs.map((x, i) => [x, ...parts.map((part) => part.y[i])])],
    h("div", { class: "keys-of" }, parts.map((part, k) => h("span", {}, swatch(`c${k % 8}`), `${part.label} ${num(part.y.at(-1))}`))));
}
