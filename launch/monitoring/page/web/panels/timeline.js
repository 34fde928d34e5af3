// The panel Timeline: what each part of the run did, from when to when. Zoom, pan, and a click that follows the links.

import { element, fill, oncePerFrame } from "../dom.js";
import { clock, duration } from "../words.js";

const ROW = 24;
const TOP = 22;
const LEAST_S = 1e-4;

export function open(place, page) {
  const run = page.runs[0];
  const state = { view: null, begin: null, end: null, lane: 0, chosen: null, turn: 0 };
  const canvas = element("canvas", { tabindex: 0, role: "img", "aria-label": "Timeline of the run’s parts. Arrow keys move, plus and minus zoom, up and down choose a lane, enter chooses the span in the middle." });
  const names = element("div", { class: "names", "aria-hidden": "true" });
  const frame = element("div", { class: "stretch" }, canvas);
  const words = element("p", { class: "hint", role: "status" }, "");
  const detail = element("div", { "aria-live": "polite" });
  const legend = element("ul", { class: "legend" });
  const button = (label, text, click) => element("button", { type: "button", class: "plain", "aria-label": label, click }, text);
  fill(place, element("h1", { class: "quiet" }, "Timeline", page.runs.length > 1 ? element("small", {}, ` of ${page.source.facts.runs[run].name}`) : null),
    element("div", { class: "controls" }, button("zoom in", "+", () => zoom(0.5)), button("zoom out", "−", () => zoom(2)), button("whole run", "whole run", () => whole()), legend),
    element("div", { class: "card lanes-of-time" }, names, frame), words, detail);

  const width = () => Math.max(50, frame.clientWidth);
  const at = (time) => ((time - state.begin) / (state.end - state.begin)) * width();
  const time = (left) => state.begin + (left / width()) * (state.end - state.begin);
  const kind = (number) => `hsl(${(number * 137.5 + 215) % 360} 55% ${isDark() ? 62 : 46}%)`;
  const isDark = () => getComputedStyle(document.documentElement).colorScheme.trim() === "dark";
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const draw = oncePerFrame(() => {
    const { view } = state;
    if (!view) return;
    const height = TOP + ROW * Math.max(1, view.lanes.length), scale = devicePixelRatio || 1;
    canvas.width = width() * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    axis(pen, height);
    pen.globalAlpha = 0.85;
    for (const [lane, from, to, number, share] of view.dense) {
      pen.globalAlpha = 0.25 + 0.6 * share;
      bar(pen, lane, from, to, number);
    }
    pen.globalAlpha = 0.85;
    for (const [lane, from, to, number, id, label] of view.spans) {
      const [left, wide] = bar(pen, lane, from, to, number);
      if (id === state.chosen) {
        pen.strokeStyle = ink("--ink");
        pen.lineWidth = 2;
        pen.strokeRect(left, TOP + lane * ROW + 2, Math.max(2, wide), ROW - 4);
      }
      if (label && wide > 40) {
        pen.save();
        pen.beginPath();
        pen.rect(left, TOP + lane * ROW, wide - 3, ROW);
        pen.clip();
        pen.globalAlpha = 1;
        pen.fillStyle = isDark() ? "#0d1015" : "#ffffff";
        pen.fillText(label, Math.max(left, 0) + 4, TOP + lane * ROW + ROW / 2);
        pen.restore();
      }
    }
    pen.globalAlpha = 0.6;
    pen.fillStyle = ink("--ink");
    for (const [lane, when] of view.marks) {
      pen.fillRect(at(when) - 0.5, lane === null ? TOP - 6 : TOP + lane * ROW + 1, 1, lane === null ? height : ROW - 2);
    }
    pen.globalAlpha = 1;
  });

  function bar(pen, lane, from, to, number) {
    const left = at(from), wide = Math.max(1, at(to) - left - 0.4);
    pen.fillStyle = kind(number);
    pen.fillRect(left, TOP + lane * ROW + 3, wide, ROW - 6);
    return [left, wide];
  }

  function axis(pen, height) {
    const span = state.end - state.begin, rough = span / Math.max(2, width() / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    const zero = state.view.run_begin;
    pen.strokeStyle = ink("--grid");
    pen.fillStyle = ink("--soft");
    for (let tick = Math.ceil((state.begin - zero) / step); zero + tick * step <= state.end; tick += 1) {
      const left = at(zero + tick * step);
      pen.fillRect(left, TOP - 4, 1, 4);
      pen.beginPath();
      pen.moveTo(left, TOP);
      pen.lineTo(left, height);
      pen.stroke();
      pen.fillText(duration(Number((tick * step).toPrecision(6))), left + 3, TOP / 2);
    }
  }

  const fetchView = soon(async () => {
    const turn = ++state.turn;
    const window_ = state.begin === null ? {} : { begin: state.begin, end: state.end };
    try {
      const view = await page.source.view("timeline", run, { ...window_, width: Math.round(width()) });
      if (turn !== state.turn) return;
      if (state.begin === null || !Number.isFinite(state.begin)) [state.begin, state.end] = [view.begin, view.end];
      state.view = view;
      frameLanes();
      draw();
    } catch (error) { page.report(error); }
  });

  function frameLanes() {
    const { view } = state;
    fill(names, view.lanes.map((lane) => element("span", { title: `${lane.name}, ${lane.role} on ${lane.node}` }, lane.name)));
    const shown = new Set([...view.spans, ...view.dense].map((span) => span[3]));
    fill(legend, view.kinds.flatMap((name, number) => (shown.has(number) ? [swatch(name, number)] : [])));
    const lost = view.dropped ? ` ${view.dropped} spans are missing: they were lost or beyond the limit.` : "";
    words.textContent = view.lanes.length ? `${clock(state.begin)}, ${duration(state.end - state.begin)} are shown.${lost}` : "No spans are recorded: the settings under trace turn them on.";
  }

  function swatch(name, number) {
    const made = element("i", { class: "swatch" });
    made.style.background = kind(number);
    return element("li", {}, made, name);
  }

  function show(begin, end) {
    if (!state.view) return;
    const wide = Math.max(LEAST_S, end - begin);
    const least = state.view.run_begin - wide / 2, most = state.view.run_end + wide / 2;
    const from = Math.min(Math.max(begin, least), Math.max(least, most - wide));
    [state.begin, state.end] = [from, from + wide];
    draw();
    if (!page.source.isFrozen) fetchView();
    else frameLanes();
  }

  function whole() { show(state.view.run_begin, state.view.run_end); }

  function zoom(factor, left = width() / 2) {
    if (!state.view) return;
    const middle = time(left);
    const all = 1.2 * (state.view.run_end - state.view.run_begin) || 1;
    const wide = Math.min(all, (state.end - state.begin) * factor);
    show(middle - (left / width()) * wide, middle + (1 - left / width()) * wide);
  }

  function pan(share) {
    const by = share * (state.end - state.begin);
    show(state.begin + by, state.end + by);
  }

  function under(left, top) {
    const lane = Math.floor((top - TOP) / ROW), when = time(left);
    const air = (2 / width()) * (state.end - state.begin);
    const spans = state.view.spans.filter((span) => span[0] === lane && span[1] - air <= when && when <= span[2] + air);
    return spans.sort((one, other) => one[2] - one[1] - (other[2] - other[1]))[0] ?? null;
  }

  async function choose(id) {
    if (id === null || page.source.isFrozen) return;
    state.chosen = id;
    page.remember({ span: id });
    draw();
    try {
      const span = await page.source.view("timeline", run, { span: id });
      if (state.chosen === id) fill(detail, span.error ? element("p", { class: "hint" }, span.error) : describe(span));
    } catch (error) { page.report(error); }
  }

  function describe(span) {
    const { kinds, lanes } = state.view;
    const facts = Object.entries(span.attributes);
    const { query, trajectory, step } = span.attributes;
    const link = query !== undefined && trajectory !== undefined && step !== undefined
      ? element("a", { href: page.address({ at: `${step}t${trajectory}.${encodeURIComponent(query)}` }, "trajectories") }, "Its trajectory") : null;
    const links = span.links.slice(0, 60).map((one) => element("li", {}, element("button", { type: "button", class: "plain", click: () => { center(one); choose(one.id); } },
      `${one.relation === "before" ? "↑" : "↓"} ${kinds[one.kind]} ${one.label ?? ""}`), element("small", {}, ` ${lanes[one.lane]?.name ?? ""}, ${duration(one.end - one.begin)}`)));
    return element("section", { class: "card span" }, element("h2", {}, `${kinds[span.kind]} ${span.label ?? ""}`),
      element("p", { class: "lead" }, `${lanes[span.lane]?.name ?? ""} · ${clock(span.begin)} · ${duration(span.end - span.begin)}`, link),
      element("ul", { class: "legend" }, facts.map(([name, value]) => element("li", {}, name, element("b", {}, String(value))))),
      links.length ? element("h3", {}, "Led to it ↑ and followed from it ↓") : null, element("ul", { class: "links" }, links));
  }

  function center(span) {
    const wide = state.end - state.begin;
    if (span.begin < state.begin || span.end > state.end) show((span.begin + span.end - wide) / 2, (span.begin + span.end + wide) / 2);
  }

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => { drag = { left: event.clientX, begin: state.begin, end: state.end, moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!state.view) return;
    if (drag) {
      const by = ((drag.left - event.clientX) / width()) * (drag.end - drag.begin);
      drag.moved ||= Math.abs(drag.left - event.clientX) > 3;
      if (drag.moved) show(drag.begin + by, drag.end + by);
      return;
    }
    const span = under(event.offsetX, event.offsetY);
    const mark = state.view.marks.find((one) => Math.abs(at(one[1]) - event.offsetX) < 3);
    if (span) words.textContent = `${state.view.kinds[span[3]]} ${span[5]} · ${state.view.lanes[span[0]].name} · ${duration(span[2] - span[1])}`;
    else if (mark) words.textContent = `${clock(mark[1])} ${mark[3]}`;
  });
  canvas.addEventListener("pointerup", (event) => {
    const moved = drag?.moved;
    drag = null;
    if (!moved && state.view) choose(under(event.offsetX, event.offsetY)?.[4] ?? null);
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / width());
    else zoom(Math.exp(event.deltaY / 400), event.offsetX);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const keys = {
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), Home: whole,
      ArrowUp: () => { state.lane = Math.max(0, state.lane - 1); point(); }, ArrowDown: () => { state.lane = Math.min(state.view.lanes.length - 1, state.lane + 1); point(); },
      Enter: () => choose(nearest()),
    };
    if (!(event.key in keys) || !state.view) return;
    event.preventDefault();
    keys[event.key]();
  });

  function nearest() {
    const middle = (state.begin + state.end) / 2;
    const gap = (span) => Math.max(span[1] - middle, middle - span[2], 0);
    return state.view.spans.filter((span) => span[0] === state.lane).sort((one, other) => gap(one) - gap(other))[0]?.[4] ?? null;
  }

  function point() { words.textContent = `lane ${state.view.lanes[state.lane]?.name ?? ""}`; }

  const sizes = new ResizeObserver(() => { draw(); if (!page.source.isFrozen && state.view) fetchView(); });
  sizes.observe(frame);

  return {
    async refresh() {
      const atEnd = state.view && Math.abs(state.begin - state.view.run_begin) < 1e-6 && Math.abs(state.end - state.view.run_end) < 1e-6;
      if (atEnd) state.begin = state.end = null;
      await fetchView.now();
      const span = page.route.get("span");
      if (span && state.chosen === null) await choose(Number(span));
      else draw();
    },
    close() { sizes.disconnect(); },
  };
}

/** Calls `work` when its calls have paused for a moment; `.now()` calls it at once. */
function soon(work) {
  let timer = 0;
  const later = () => { clearTimeout(timer); timer = setTimeout(work, 60); };
  later.now = work;
  return later;
}
