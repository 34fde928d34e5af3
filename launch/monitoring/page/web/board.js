// A board of charts of one or several runs. A chart is fetched and drawn when it comes into view.

import { Chart, colour, smoothed } from "./chart.js";
import { element, fill } from "./dom.js";

const SPARSE = 40;

export class Board {
  /** `page`: of main.js. `options()`: `{smoothing, isBand}` as the panel's controls have them. */
  constructor(place, page, options) {
    this.place = place;
    this.page = page;
    this.options = options;
    this.tiles = new Map();
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const tile = this.tiles.get(entry.target.dataset.key);
        if (!tile) continue;
        tile.isSeen = entry.isIntersecting;
        if (tile.isSeen && tile.isStale) this.#draw(tile);
      }
    }, { rootMargin: "300px" });
  }

  /** Shows these charts, grouped under headings: `{title, unit, meaning, percent, complement, group, series}`. */
  show(charts, headings = {}) {
    const key = (chart) => `${chart.group}/${chart.title}`;
    const wanted = new Set(charts.map(key));
    for (const [name, tile] of this.tiles) {
      if (!wanted.has(name)) this.#remove(name, tile);
    }
    const groups = new Map();
    for (const facts of charts) {
      const name = key(facts);
      let tile = this.tiles.get(name);
      if (!tile) this.tiles.set(name, (tile = this.#tile(name, facts)));
      tile.series = facts.series;
      tile.isStale = true;
      const group = groups.get(facts.group) ?? groups.set(facts.group, []).get(facts.group);
      group.push(tile.card);
    }
    const form = [...wanted].join("|");
    if (form !== this.form) {
      this.form = form;
      fill(this.place, [...groups].map(([group, cards]) => element("section", { class: `group ${group}` },
        headings[group] ? element("h2", {}, headings[group]) : null, element("div", { class: "board" }, cards))));
    }
    this.redraw();
  }

  /** Draws all again that is in view: data, theme or options have changed. */
  redraw() {
    for (const tile of this.tiles.values()) {
      tile.isStale = true;
      if (tile.isSeen) this.#draw(tile);
    }
  }

  close() {
    this.seen.disconnect();
    for (const [name, tile] of this.tiles) this.#remove(name, tile);
  }

  #tile(name, facts) {
    const canvas = element("div");
    const words = [facts.unit, facts.meaning].filter(Boolean);
    const card = element("article", { class: "card chart", "data-key": name },
      element("h3", {}, facts.title, facts.unit ? element("small", {}, facts.unit) : null),
      facts.meaning ? element("p", { class: "meaning", title: words.join(": ") }, facts.meaning) : null, canvas);
    const tile = { card, series: facts.series, facts, isStale: true, isSeen: false, range: null };
    tile.chart = new Chart(canvas, facts, { zoomed: (range) => this.#zoom(tile, range) });
    this.seen.observe(card);
    return tile;
  }

  #remove(name, tile) {
    this.seen.unobserve(tile.card);
    tile.chart.close();
    this.tiles.delete(name);
  }

  #zoom(tile, range) {
    if (this.page.source.isFrozen || JSON.stringify(range) === JSON.stringify(tile.range)) return;
    tile.range = range;
    this.#draw(tile);
  }

  async #draw(tile) {
    tile.isStale = false;
    const order = (tile.order = (tile.order ?? 0) + 1);
    const keys = [...new Set(tile.series.flatMap((series) => [series.key, series.over].filter(Boolean)))];
    const runs = this.page.runs;
    try {
      const answers = await Promise.all(runs.map((run) => this.#fetch(run, keys, tile.range)));
      if (order === tile.order) tile.chart.draw(this.#curves(tile, runs, answers));
    } catch (error) {
      if (order === tile.order) this.page.report(error);
    }
  }

  /** The curves of the whole run, with all points of a range that is zoomed into: the rest is there to zoom out. */
  async #fetch(run, keys, range) {
    const { source } = this.page;
    const [whole, part] = await Promise.all([source.curves(run, keys), range ? source.curves(run, keys, range) : {}]);
    return Object.fromEntries(Object.entries(whole).map(([key, curve]) => [key, part[key] ? refined(curve, part[key], range) : curve]));
  }

  #curves(tile, runs, answers) {
    const { smoothing, isBand } = this.options();
    const several = runs.length > 1;
    const curves = [];
    tile.series.forEach((series, place) => {
      const ofRuns = answers.map((answer) => value(answer, series, tile.facts.complement));
      if (several && isBand) {
        const band = over(ofRuns.filter((curve) => curve.steps.length));
        if (band) curves.push({ ...band, label: series.label, colour: colour(place), dash: 0 });
        return;
      }
      ofRuns.forEach((curve, index) => {
        if (!curve.steps.length) return;
        const name = this.page.source.facts.runs[runs[index]].name;
        const label = !several ? series.label : tile.series.length > 1 ? `${name} · ${series.label}` : name;
        curves.push({ ...curve, label, colour: colour(several ? runs[index] : place), dash: several ? place : 0 });
      });
    });
    return curves.map((curve) => ({ ...curve, mean: smoothed(curve.mean, smoothing), isSparse: curve.steps.length <= SPARSE }));
  }
}

/** A curve with the points of `part` in place of its own within a range of steps. */
function refined(curve, part, { first, last }) {
  const before = curve.steps.filter((step) => step < first).length;
  const after = curve.steps.filter((step) => step > last).length;
  const join = (values, finer) => [...values.slice(0, before), ...finer, ...values.slice(values.length - after)];
  const joined = { steps: join(curve.steps, part.steps), mean: join(curve.mean, part.mean) };
  if (!curve.low) return joined;
  return { ...joined, low: join(curve.low, part.low ?? part.mean), high: join(curve.high, part.high ?? part.mean) };
}

/** A series of one run: its curve, divided by another one, or its complement to 1. */
function value(answer, series, isComplement) {
  let curve = answer[series.key] ?? { steps: [], mean: [] };
  if (series.over) {
    const whole = answer[series.over] ?? { steps: [], mean: [] };
    const at = new Map(whole.steps.map((step, place) => [step, whole.mean[place]]));
    curve = { steps: curve.steps, mean: curve.mean.map((part, place) => (at.get(curve.steps[place]) ? part / at.get(curve.steps[place]) : null)) };
  }
  if (isComplement) {
    const flip = (values) => values?.map((share) => (share === null ? null : 1 - share));
    curve = { steps: curve.steps, mean: flip(curve.mean), low: flip(curve.high), high: flip(curve.low) };
  }
  return curve;
}

/** Mean, least and greatest value of several runs at each step that all reach. */
function over(curves) {
  if (!curves.length) return null;
  const at = new Map();
  for (const curve of curves) {
    curve.steps.forEach((step, place) => {
      if (curve.mean[place] === null) return;
      (at.get(step) ?? at.set(step, []).get(step)).push(curve.mean[place]);
    });
  }
  const steps = [...at.keys()].sort((a, b) => a - b);
  const values = steps.map((step) => at.get(step));
  return {
    steps, mean: values.map((ofRuns) => ofRuns.reduce((a, b) => a + b, 0) / ofRuns.length),
    low: values.map((ofRuns) => Math.min(...ofRuns)), high: values.map((ofRuns) => Math.max(...ofRuns)),
  };
}

/** Controls of a board: smoothing, and for several runs curves or a band. Calls `changed`; returns `{place, options}`. */
export function controls(page, changed, ...more) {
  const smoothing = element("select", { change: changed }, [1, 5, 20, 100].map((steps) =>
    element("option", { value: steps }, steps === 1 ? "no smoothing" : `over ${steps} points`)));
  const band = element("select", { change: changed }, element("option", { value: "each" }, "a curve for each run"),
    element("option", { value: "band" }, "mean and range of the runs"));
  const place = element("form", { class: "controls", submit: (event) => event.preventDefault() }, ...more,
    element("label", {}, "Smoothing", smoothing),
    page.runs.length > 1 ? element("label", {}, "Runs", band) : null);
  return { place, options: () => ({ smoothing: Number(smoothing.value), isBand: band.value === "band" }) };
}
