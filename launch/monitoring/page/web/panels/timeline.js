// The panel Timeline: what each part of the run did, from when to when. Zoom, pan, and a click that follows the links.
// Several runs are one above the other, each by the seconds from its own zero.

import { element, fill, oncePerFrame } from "../dom.js";
import { clock, duration } from "../words.js";

const ROW = 24;
const TOP = 22;
const LEAST_S = 1e-4;

const isDark = () => getComputedStyle(document.documentElement).colorScheme.trim() === "dark";
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function open(place, page) {
  const isSeveral = page.runs.length > 1;
  // `begin` and `end`: seconds from the zero of each strip.
  const state = { begin: null, end: null, chosen: null, order: 0 };
  const hues = [];
  const words = element("p", { class: "hint", role: "status" }, "");
  const detail = element("div", { "aria-live": "polite" });
  const legend = element("ul", { class: "legend" });
  const kind = (name) => {
    if (!hues.includes(name)) hues.push(name);
    // Hues alone are too near to each other from the fourth kind on.
    const place = hues.indexOf(name), lightness = (isDark() ? [62, 78, 48] : [46, 62, 32])[place % 3];
    return `hsl(${(place * 137.5 + 215) % 360} 55% ${lightness}%)`;
  };
  const strips = page.runs.map((run) => new Strip(run, { page, state, kind, isSeveral, say: (text) => { words.textContent = text; }, show, zoom, pan, choose, whole }));
  const button = (label, text, click) => element("button", { type: "button", class: "plain", "aria-label": label, click }, text);
  const aligned = alignment(page.route.get("align"), (step) => { page.remember({ align: step || null }); align(step); });
  fill(place, element("h1", { class: "quiet" }, "Timeline"),
    element("div", { class: "controls" }, isSeveral ? aligned.place : null,
      button("zoom in", "+", () => zoom(0.5)), button("zoom out", "−", () => zoom(2)), button(isSeveral ? "whole runs" : "whole run", isSeveral ? "whole runs" : "whole run", () => whole()), legend),
    strips.map((strip) => strip.card), words, detail);

  const fetchViews = soon(async () => {
    const order = ++state.order;
    try {
      await Promise.all(strips.map((strip) => strip.fetch()));
      if (order !== state.order) return;
      if (state.begin === null) {
        [state.begin, state.end] = ends();
        if (isSeveral) return await fetchViews.now(); // in the window that they share
      }
      frame();
      strips.forEach((strip) => strip.draw());
    } catch (error) { page.report(error); }
  });

  /** The first and the last second of all runs, from the zero of each. */
  function ends() {
    const views = strips.filter((strip) => strip.view);
    return [Math.min(...views.map((strip) => strip.view.run_begin - strip.zero)), Math.max(...views.map((strip) => strip.view.run_end - strip.zero), LEAST_S)];
  }

  function frame() {
    const shown = strips.flatMap((strip) => strip.kinds());
    fill(legend, [...new Set(shown)].map((name) => {
      const swatch = element("i", { class: "swatch" });
      swatch.style.background = kind(name);
      return element("li", {}, swatch, name);
    }));
    strips.forEach((strip) => strip.frame());
    const dropped = strips.reduce((sum, strip) => sum + (strip.view?.dropped ?? 0), 0);
    const lost = dropped ? ` ${dropped} spans are missing: they were lost or beyond the limit.` : "";
    const from = isSeveral ? `From ${duration(state.begin)}` : clock(strips[0].zero + state.begin);
    words.textContent = strips.some((strip) => strip.view?.lanes.length) ? `${from}, ${duration(state.end - state.begin)} are shown.${lost}` : "No spans are recorded: the settings under trace turn them on.";
  }

  function show(begin, end) {
    if (!strips.some((strip) => strip.view)) return;
    const wide = Math.max(LEAST_S, end - begin), [first, last] = ends();
    const least = first - wide / 2, most = last + wide / 2;
    const from = Math.min(Math.max(begin, least), Math.max(least, most - wide));
    [state.begin, state.end] = [from, from + wide];
    strips.forEach((strip) => strip.draw());
    if (!page.source.isFrozen) fetchViews();
    else frame();
  }

  function whole() { show(...ends()); }

  /** `share`: the place that stays, from 0 at the left to 1. */
  function zoom(factor, share = 0.5) {
    if (state.begin === null) return;
    const [first, last] = ends(), length = state.end - state.begin, middle = state.begin + share * length;
    const wide = Math.min(1.2 * (last - first) || 1, length * factor);
    show(middle - share * wide, middle + (1 - share) * wide);
  }

  function pan(share) {
    const by = share * (state.end - state.begin);
    show(state.begin + by, state.end + by);
  }

  /** Puts the zero of every run at its begin, or at the begin of a step. */
  async function align(step) {
    try {
      const answers = step ? await Promise.all(strips.map((strip) => page.source.view("timeline", strip.run, { step }))) : [];
      const missing = answers.filter((answer) => answer.error);
      page.notice.hidden = !missing.length;
      page.notice.textContent = missing.map((answer) => answer.error).join("; ");
      if (missing.length) return;
      strips.forEach((strip, index) => { strip.zero = step ? answers[index].begin : null; });
      state.begin = null;
      if (step) {
        const longest = Math.max(...answers.map((answer) => answer.end - answer.begin));
        [state.begin, state.end] = [-0.1 * longest, 1.1 * longest];
      }
      await fetchViews.now();
    } catch (error) { page.report(error); }
  }

  async function choose(strip, id) {
    if (id === null || page.source.isFrozen) return;
    state.chosen = { run: strip.run, id };
    page.remember({ span: id, of: isSeveral ? strip.run : null });
    strips.forEach((one) => one.draw());
    try {
      const span = await page.source.view("timeline", strip.run, { span: id });
      if (state.chosen.id === id && state.chosen.run === strip.run) fill(detail, span.error ? element("p", { class: "hint" }, span.error) : describe(strip, span));
    } catch (error) { page.report(error); }
  }

  function describe(strip, span) {
    const { kinds, lanes } = strip.view;
    const facts = Object.entries(span.attributes);
    const { query, trajectory, step } = span.attributes;
    const link = query !== undefined && trajectory !== undefined && step !== undefined
      ? element("a", { href: page.address({ at: `${step}t${trajectory}.${encodeURIComponent(query)}`, run: isSeveral ? strip.run : null }, "trajectories") }, "Its trajectory") : null;
    const links = span.links.slice(0, 60).map((one) => element("li", {}, element("button", { type: "button", class: "plain", click: () => { center(strip, one); choose(strip, one.id); } },
      `${one.relation === "before" ? "↑" : "↓"} ${kinds[one.kind]} ${one.label ?? ""}`), element("small", {}, ` ${lanes[one.lane]?.name ?? ""}, ${duration(one.end - one.begin)}`)));
    return element("section", { class: "card span" }, element("h2", {}, `${kinds[span.kind]} ${span.label ?? ""}`),
      element("p", { class: "lead" }, `${isSeveral ? `${strip.name} · ` : ""}${lanes[span.lane]?.name ?? ""} · ${clock(span.begin)} · ${duration(span.end - span.begin)}`, link),
      element("ul", { class: "legend" }, facts.map(([name, value]) => element("li", {}, name, element("b", {}, String(value))))),
      links.length ? element("h3", {}, "Led to it ↑ and followed from it ↓") : null, element("ul", { class: "links" }, links));
  }

  function center(strip, span) {
    const wide = state.end - state.begin, middle = (span.begin + span.end) / 2 - strip.zero;
    if (span.begin - strip.zero < state.begin || span.end - strip.zero > state.end) show(middle - wide / 2, middle + wide / 2);
  }

  const sizes = new ResizeObserver(() => { strips.forEach((strip) => strip.draw()); if (!page.source.isFrozen && state.begin !== null) fetchViews(); });
  sizes.observe(place);

  return {
    async refresh() {
      const isFirst = state.begin === null;
      if (isFirst && isSeveral && aligned.step()) await align(aligned.step());
      else {
        const [first, last] = isFirst ? [0, 0] : ends();
        if (!isFirst && Math.abs(state.begin - first) < 1e-6 && Math.abs(state.end - last) < 1e-6) state.begin = null;
        await fetchViews.now();
      }
      const span = page.route.get("span"), of = page.route.get("of");
      const strip = strips.find((one) => String(one.run) === of) ?? strips[0];
      if (span && state.chosen === null) await choose(strip, Number(span));
    },
    close() { sizes.disconnect(); },
  };
}

/** The choice of the moment that all runs have at zero: `step()` is empty for their begin. */
function alignment(value, changed) {
  const number = element("input", { type: "number", min: 1, size: 6, value: value ?? "", placeholder: "their begin", input: () => { clearTimeout(timer); timer = setTimeout(() => changed(step()), 300); } });
  const step = () => (/^[1-9][0-9]{0,8}$/.test(number.value) ? number.value : "");
  let timer = 0;
  return { place: element("label", {}, "Aligned by the begin of step", number), step };
}

/** The lanes of one run. `zero`: the time, in seconds since 1970, from which its window counts; null: the run's begin. */
class Strip {
  constructor(run, panel) {
    Object.assign(this, { run, panel, view: null, zero: null, lane: 0, order: 0 });
    this.name = panel.page.source.facts.runs[run].name;
    const of = panel.isSeveral ? ` of ${this.name}` : "";
    this.canvas = element("canvas", { tabindex: 0, role: "img", "aria-label": `Timeline of the run’s parts${of}. Arrow keys move, plus and minus zoom, up and down choose a lane, enter chooses the span in the middle.` });
    this.names = element("div", { class: "names", "aria-hidden": "true" });
    this.stretch = element("div", { class: "stretch" }, this.canvas);
    const swatch = element("i", { class: "swatch" });
    swatch.style.background = `var(--series-${run % 8})`;
    this.card = element("section", { class: "card" }, panel.isSeveral ? element("h2", { class: "strip-name" }, swatch, this.name) : null,
      element("div", { class: "lanes-of-time" }, this.names, this.stretch));
    this.draw = oncePerFrame(() => this.#draw());
    this.#listen();
  }

  get width() { return Math.max(50, this.stretch.clientWidth); }

  #at(time) { const { begin, end } = this.panel.state; return ((time - this.zero - begin) / (end - begin)) * this.width; }

  #time(left) { const { begin, end } = this.panel.state; return this.zero + begin + (left / this.width) * (end - begin); }

  async fetch() {
    const { page, state } = this.panel, order = ++this.order;
    const window_ = state.begin === null || this.zero === null ? {} : { begin: this.zero + state.begin, end: this.zero + state.end };
    const view = await page.source.view("timeline", this.run, { ...window_, width: Math.round(this.width) });
    if (order !== this.order) return;
    this.view = view;
    this.zero ??= view.run_begin;
    view.kinds.forEach((name) => this.panel.kind(name)); // a kind keeps its colour, also while it is not in view
  }

  /** The kinds of the spans that are shown. */
  kinds() {
    if (!this.view) return [];
    return [...new Set([...this.view.spans, ...this.view.dense].map((span) => span[3]))].sort((a, b) => a - b).map((number) => this.view.kinds[number]);
  }

  frame() {
    if (this.view) fill(this.names, this.view.lanes.map((lane) => element("span", { title: `${lane.name}, ${lane.role} on ${lane.node}` }, lane.name)));
  }

  #draw() {
    const { view } = this, { state } = this.panel;
    if (!view || state.begin === null) return;
    const height = TOP + ROW * Math.max(1, view.lanes.length), scale = devicePixelRatio || 1;
    this.canvas.width = this.width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.#axis(pen, height);
    for (const [lane, from, to, number, share] of view.dense) {
      pen.globalAlpha = 0.25 + 0.6 * share;
      this.#bar(pen, lane, from, to, number);
    }
    pen.globalAlpha = 0.85;
    for (const span of view.spans) this.#span(pen, span);
    pen.globalAlpha = 0.6;
    pen.fillStyle = ink("--ink");
    for (const [lane, when] of view.marks) {
      pen.fillRect(this.#at(when) - 0.5, lane === null ? TOP - 6 : TOP + lane * ROW + 1, 1, lane === null ? height : ROW - 2);
    }
    pen.globalAlpha = 1;
  }

  #span(pen, [lane, from, to, number, id, label]) {
    const { chosen } = this.panel.state;
    const [left, wide] = this.#bar(pen, lane, from, to, number);
    if (chosen?.id === id && chosen.run === this.run) {
      pen.strokeStyle = ink("--ink");
      pen.lineWidth = 2;
      pen.strokeRect(left, TOP + lane * ROW + 2, Math.max(2, wide), ROW - 4);
    }
    if (!label || wide <= 40) return;
    pen.save();
    pen.beginPath();
    pen.rect(left, TOP + lane * ROW, wide - 3, ROW);
    pen.clip();
    pen.globalAlpha = 1;
    pen.fillStyle = isDark() ? "#0d1015" : "#ffffff";
    pen.fillText(label, Math.max(left, 0) + 4, TOP + lane * ROW + ROW / 2);
    pen.restore();
  }

  #bar(pen, lane, from, to, number) {
    const left = this.#at(from), wide = Math.max(1, this.#at(to) - left - 0.4);
    pen.fillStyle = this.panel.kind(this.view.kinds[number]);
    pen.fillRect(left, TOP + lane * ROW + 3, wide, ROW - 6);
    return [left, wide];
  }

  #axis(pen, height) {
    const { begin, end } = this.panel.state, rough = (end - begin) / Math.max(2, this.width / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    pen.strokeStyle = ink("--grid");
    pen.fillStyle = ink("--soft");
    for (let tick = Math.ceil(begin / step); tick * step <= end; tick += 1) {
      const left = this.#at(this.zero + tick * step);
      pen.fillRect(left, TOP - 4, 1, 4);
      pen.beginPath();
      pen.moveTo(left, TOP);
      pen.lineTo(left, height);
      pen.stroke();
      pen.fillText(duration(Number((tick * step).toPrecision(6))), left + 3, TOP / 2);
    }
  }

  #under(left, top) {
    const { begin, end } = this.panel.state;
    const lane = Math.floor((top - TOP) / ROW), when = this.#time(left), air = (2 / this.width) * (end - begin);
    const spans = this.view.spans.filter((span) => span[0] === lane && span[1] - air <= when && when <= span[2] + air);
    return spans.sort((one, other) => one[2] - one[1] - (other[2] - other[1]))[0] ?? null;
  }

  #nearest() {
    const middle = this.#time(this.width / 2);
    const gap = (span) => Math.max(span[1] - middle, middle - span[2], 0);
    return this.view.spans.filter((span) => span[0] === this.lane).sort((one, other) => gap(one) - gap(other))[0]?.[4] ?? null;
  }

  #listen() {
    const { canvas, panel } = this, { state } = panel;
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => { drag = { left: event.clientX, begin: state.begin, end: state.end, moved: false }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.view) return;
      if (drag) {
        const by = ((drag.left - event.clientX) / this.width) * (drag.end - drag.begin);
        drag.moved ||= Math.abs(drag.left - event.clientX) > 3;
        if (drag.moved) panel.show(drag.begin + by, drag.end + by);
        return;
      }
      const span = this.#under(event.offsetX, event.offsetY);
      const mark = this.view.marks.find((one) => Math.abs(this.#at(one[1]) - event.offsetX) < 3);
      if (span) panel.say(`${this.view.kinds[span[3]]} ${span[5]} · ${this.view.lanes[span[0]].name} · ${duration(span[2] - span[1])}`);
      else if (mark) panel.say(`${clock(mark[1])} ${mark[3]}`);
    });
    canvas.addEventListener("pointerup", (event) => {
      const moved = drag?.moved;
      drag = null;
      if (!moved && this.view) panel.choose(this, this.#under(event.offsetX, event.offsetY)?.[4] ?? null);
    });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) panel.pan(event.deltaX / this.width);
      else panel.zoom(Math.exp(event.deltaY / 400), event.offsetX / this.width);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const turn = (by) => { this.lane = Math.max(0, Math.min(this.view.lanes.length - 1, this.lane + by)); panel.say(`lane ${this.view.lanes[this.lane]?.name ?? ""}`); };
      const keys = {
        ArrowLeft: () => panel.pan(-0.2), ArrowRight: () => panel.pan(0.2), "+": () => panel.zoom(0.6), "=": () => panel.zoom(0.6), "-": () => panel.zoom(1.6), Home: panel.whole,
        ArrowUp: () => turn(-1), ArrowDown: () => turn(1), Enter: () => panel.choose(this, this.#nearest()),
      };
      if (!(event.key in keys) || !this.view || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });
  }
}

/** Calls `work` when its calls have paused for a moment; `.now()` calls it at once. */
function soon(work) {
  let timer = 0;
  const later = () => { clearTimeout(timer); timer = setTimeout(work, 60); };
  later.now = work;
  return later;
}
