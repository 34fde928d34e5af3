// One chart: curves over steps, with bands, a legend of values under the cursor, zoom by drag, and a cursor by keys.

import uPlot from "./uplot/uPlot.esm.js";
import { element, fill } from "./dom.js";
import { compact, percent } from "./words.js";

const SYNC = "steps";
const PALETTE = 8;
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];

/** The colour of a place in the palette, as the theme has it. */
export function colour(place) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--series-${place % PALETTE}`).trim();
}

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** `#rrggbb` with an opacity. */
function faint(colour_, share) {
  return colour_ + Math.round(255 * share).toString(16).padStart(2, "0");
}

/** Exponential means over about `steps` values; gaps stay gaps. */
export function smoothed(values, steps) {
  if (steps <= 1) return values;
  const share = 2 / (steps + 1);
  let mean = null;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = mean === null ? value : mean + share * (value - mean);
    return mean;
  });
}

export class Chart {
  /** `place`: an element that the chart fills. `facts`: `title`, `unit`, `meaning`, `percent`, `height`. */
  constructor(place, facts, { zoomed = null } = {}) {
    this.facts = facts;
    this.zoomed = zoomed;
    this.legend = element("ul", { class: "legend" });
    this.canvas = element("div", { class: "canvas", tabindex: 0, role: "img", "aria-label": facts.title });
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    fill(place, this.canvas, this.legend);
    this.sizes = new ResizeObserver(() => this.#resize());
    this.sizes.observe(this.canvas);
    this.curves = [];
  }

  /** Draws curves: `{label, colour, dash, steps, mean, low, high}`, the last two may be missing. */
  draw(curves) {
    const form = curves.map((curve) => [curve.label, curve.colour, curve.dash, Boolean(curve.low)].join()).join("|");
    const isSame = this.plot && form === this.form && this.theme === ink("--paper");
    this.curves = curves;
    const data = joined(curves);
    if (isSame) this.plot.setData(data, !this.isZoomed);
    else this.#make(data, form);
    this.#describe();
    this.#values(null);
  }

  close() {
    this.sizes.disconnect();
    this.plot?.destroy();
  }

  get #text() {
    return this.facts.percent ? percent : compact;
  }

  #make(data, form) {
    this.plot?.destroy();
    this.form = form;
    this.theme = ink("--paper");
    this.isZoomed = false;
    const series = [{}];
    const bands = [];
    for (const curve of this.curves) {
      const tint = faint(curve.colour, 0.16);
      if (curve.low) {
        series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
        bands.push({ series: [series.length - 1, series.length - 2], fill: tint });
      }
      series.push({
        stroke: curve.colour, width: 1.8, dash: DASHES[curve.dash % DASHES.length], spanGaps: true,
        points: { show: curve.steps.length < 2 || curve.isSparse, size: 5, fill: curve.colour },
      });
    }
    const axis = { stroke: ink("--soft"), grid: { stroke: ink("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.plot = new uPlot({
      width: Math.max(60, this.canvas.clientWidth), height: this.facts.height ?? 190,
      series, bands,
      legend: { show: false },
      scales: { x: { time: false }, y: { range: (_, low, high) => spread(low, high) } },
      axes: [
        { ...axis, size: 26, space: 60, values: (_, splits) => splits.map((split) => (Number.isInteger(split) ? split : "")) },
        { ...axis, size: 46, values: (_, splits) => splits.map((split) => this.#text(split)) },
      ],
      cursor: { sync: { key: SYNC, scales: ["x", null] }, drag: { x: true, y: false }, points: { size: 7 }, focus: { prox: 1e6 } },
      hooks: {
        setCursor: [(plot) => this.#values(plot.cursor.idx)],
        setScale: [(plot, scale) => this.#scaled(plot, scale)],
      },
    }, data, this.canvas);
  }

  #scaled(plot, scale) {
    if (scale !== "x" || !plot.data[0].length) return;
    const { min, max } = plot.scales.x;
    const steps = plot.data[0];
    this.isZoomed = min > steps[0] || max < steps[steps.length - 1];
    this.zoomed?.(this.isZoomed ? { first: Math.floor(min), last: Math.ceil(max) } : null);
  }

  #resize() {
    const width = this.canvas.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.plot.height });
  }

  /** The legend: the values at the cursor, or the last ones. */
  #values(place) {
    const step = place === null || place === undefined || !this.plot ? null : this.plot.data[0][place];
    const items = this.curves.map((curve) => {
      const at = step === null ? curve.mean.length - 1 : nearest(curve.steps, step);
      const swatch = element("i", { class: "swatch" });
      swatch.style.background = curve.colour;
      return element("li", {}, swatch, element("span", {}, curve.label), element("b", {}, this.#text(curve.mean[at])));
    });
    fill(this.legend, items, step === null ? null : element("li", { class: "at" }, `step ${step}`));
  }

  #describe() {
    const sentences = this.curves.map((curve) => {
      const { mean, steps } = curve;
      return mean.length ? `${curve.label}: ${this.#text(mean[0])} at step ${steps[0]}, ${this.#text(mean.at(-1))} at step ${steps.at(-1)}` : `${curve.label}: no value`;
    });
    this.canvas.setAttribute("aria-label", `${this.facts.title}. ${sentences.join("; ")}. Arrow keys move the cursor.`);
  }

  #key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10 };
    const steps = this.plot?.data[0] ?? [];
    if (!steps.length) return;
    let place = this.plot.cursor.idx ?? (event.key === "ArrowLeft" ? steps.length : -1);
    if (event.key in moves) place += moves[event.key];
    else if (event.key === "Home") place = 0;
    else if (event.key === "End") place = steps.length - 1;
    else if (event.key === "Escape") {
      this.plot.setScale("x", { min: steps[0], max: steps[steps.length - 1] });
      return;
    } else return;
    event.preventDefault();
    place = Math.max(0, Math.min(steps.length - 1, place));
    this.plot.setCursor({ left: this.plot.valToPos(steps[place], "x"), top: this.plot.height / 3 });
  }
}

/** The data of uPlot: one row of steps, and for each curve its bounds and its values. */
function joined(curves) {
  const tables = curves.map((curve) => (curve.low ? [curve.steps, curve.low, curve.high, curve.mean] : [curve.steps, curve.mean]));
  if (!tables.length) return [[]];
  return tables.length === 1 ? tables[0] : uPlot.join(tables);
}

/** The range of an axis: some air, also around a curve that is flat. */
function spread(low, high) {
  if (low === null || high === null) return [0, 1];
  const air = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
  const floor = low >= 0 && low - air < 0 ? 0 : low - air;
  return [floor, high + air];
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return low;
}
