// The panel Policies and pool: who had which slots when and why; instances and their moves.

import { colour } from "../chart.js";
import { card, element, fill, longText, table } from "../dom.js";
import { clock, compact, duration, percent } from "../words.js";

const ROW = 26;

export function open(place, page) {
  let sizes = null;
  return {
    async refresh() {
      const views = await Promise.all(page.runs.map((run) => page.source.view("policies", run)));
      sizes?.disconnect();
      sizes = new ResizeObserver((entries) => entries.forEach((entry) => entry.target.redraw?.()));
      fill(place, views.map((view, index) => element("div", { class: "now" },
        page.runs.length > 1 ? element("h2", { class: "name" }, page.source.facts.runs[page.runs[index]].name) : element("h1", { class: "quiet" }, "Policies and pool"),
        policies(view), slots(view, sizes), reasons(view), instances(view), moves(view), paths(view))));
    },
    close() { sizes?.disconnect(); },
  };
}

function policies(view) {
  if (!view.policies.length) return card("Policies", element("p", { class: "hint" }, "No step has finished yet."));
  const pooled = view.policies.some((policy) => policy.seconds);
  const heads = ["policy", "agents", { head: "version", number: true }, { head: "trained samples", number: true },
    ...(pooled ? ["its time in the pool", { head: "suspensions", number: true }, { head: "moved MiB", number: true }] : [])];
  const rows = view.policies.map((policy) => [policy.name, policy.agents.join(", "), String(policy.version), compact(policy.samples),
    ...(pooled ? [shares(policy, view.parts), compact(policy.suspensions), compact(policy.moved_mib)] : [])]);
  const legend = pooled ? element("ul", { class: "legend" }, view.parts.map((part) => element("li", {}, element("i", { class: `swatch pool-${part}` }), part))) : null;
  return card("Policies", table(heads, rows, "policies"), legend);
}

function shares(policy, parts) {
  if (!policy.seconds) return "–";
  const whole = Object.values(policy.seconds).reduce((a, b) => a + b, 0) || 1;
  const bars = parts.map((part) => {
    const bar = element("i", { class: `pool-${part}` });
    bar.style.width = `${(100 * policy.seconds[part]) / whole}%`;
    return bar;
  });
  const words = parts.map((part) => `${part} ${percent(policy.seconds[part] / whole)}`).join(", ");
  return element("span", { class: "shares", role: "img", "aria-label": words, title: words }, bars);
}

/** One lane a slot, coloured by the policy that had it. */
function slots(view, sizes) {
  const { slots: names, policies: owners, stays, hidden } = view.stays;
  if (!stays.length) return null;
  const begin = Math.min(...stays.map((stay) => stay[2] ?? Infinity));
  const end = Math.max(...stays.map((stay) => stay[3] ?? stay[2]));
  const canvas = element("canvas", { role: "img", "aria-label": `Policies on ${names.length} slots: ${owners.join(", ")}` });
  const note = element("p", { class: "hint", role: "status" }, "Point at a stay to see its reason.");
  const at = (time, width) => ((time - begin) / (end - begin || 1)) * width;
  const frame = element("div", { class: "lanes" }, canvas);
  frame.redraw = () => {
    const width = frame.clientWidth, height = names.length * ROW;
    const scale = devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    for (const [slot, policy, from, to] of stays) {
      pen.fillStyle = colour(policy);
      const left = at(from ?? begin, width);
      pen.fillRect(left, slot * ROW + 4, Math.max(1, at(to ?? end, width) - left - 0.5), ROW - 8);
    }
  };
  canvas.addEventListener("pointermove", (event) => {
    const slot = Math.floor(event.offsetY / ROW), width = frame.clientWidth;
    const stay = stays.findLast((stay) => stay[0] === slot && at(stay[2] ?? begin, width) <= event.offsetX && event.offsetX <= at(stay[3] ?? end, width));
    if (stay) note.textContent = `${owners[stay[1]]} on ${names[slot]}, ${clock(stay[2])}, ${stay[3] ? duration(stay[3] - stay[2]) : "still there"}: ${stay[4]}`;
  });
  sizes.observe(frame);
  return card("Slots", element("ul", { class: "legend" }, owners.map((name, policy) => {
    const swatch = element("i", { class: "swatch" });
    swatch.style.background = `var(--series-${policy % 8})`;
    return element("li", {}, swatch, name);
  }), element("li", { class: "at" }, `${clock(begin)} to ${clock(end)}`)), frame, note, hidden ? element("p", { class: "hint" }, `${hidden} earlier stays are in events.jsonl.`) : null);
}

function reasons(view) {
  if (!view.reasons.length) return null;
  const heads = ["policy", "", "path", { head: "times", number: true }, { head: "mean MiB", number: true }, { head: "mean ms", number: true }, "the commonest reason"];
  return card("Suspensions", table(heads, view.reasons.map((row) => [row.policy, row.kind, row.path, String(row.times), compact(row.mean_bytes / 2 ** 20), compact(1000 * row.mean_s), row.reason]), "suspensions"),
    view.losses.length ? element("ul", {}, view.losses.map((loss) => element("li", {}, `${clock(loss.time)} ${loss.text}`))) : null);
}

function instances(view) {
  if (!view.instances.length) return null;
  const heads = ["instance", "policy", "state", { head: "turns", number: true }, "since", "reason"];
  return card("Instances", table(heads, view.instances.map((row) => [row.name, row.policy, row.state, compact(row.turns), clock(row.time), row.reason]), "instances"));
}

function moves(view) {
  if (!view.moves.length) return null;
  return card("Moves of instances", element("ol", { class: "news" }, view.moves.map((move) => element("li", {}, element("time", {}, clock(move.time)), longText(move.text, { most: 400, tag: "span" })))));
}

function paths(view) {
  if (!view.paths.length) return null;
  return card("Paths of new weights", table(["policy", "path", "instances", "reason", "against faster paths"],
    view.paths.map((row) => [row.policy, row.path, row.instances.join(", "), row.reason, row.refused || "–"]), "paths"));
}
