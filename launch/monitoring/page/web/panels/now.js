// The panel Now: the run at one look.

import { card, element, fill, longText, table } from "../dom.js";
import { clock, compact, duration } from "../words.js";

export function open(place, page) {
  let order = 0;
  return {
    async refresh() {
      const turn = ++order;
      const views = await Promise.all(page.runs.map((run) => page.source.view("now", run)));
      if (turn !== order) return;
      const open_ = new Set([...place.querySelectorAll("details[open]")].map((details) => details.dataset.key));
      fill(place, views.map((view, index) => ofRun(view, page, page.runs[index])));
      for (const details of place.querySelectorAll("details")) details.open = open_.has(details.dataset.key);
    },
    close() {},
  };
}

function ofRun(view, page, run) {
  const several = page.runs.length > 1;
  return element("div", { class: "now" },
    several ? element("h2", { class: "name" }, page.source.facts.runs[run].name) : null,
    element("div", { class: "hero" },
      element(several ? "h3" : "h1", {}, view.headline),
      element("p", { class: "lead" }, element("span", { class: `chip ${view.state.replace(" ", "-")}` }, view.state),
        [view.recipe, view.mode && `mode ${view.mode}`, view.began && `since ${clock(view.began)}`].filter(Boolean).join(" · "))),
    failure(view), standstill(view), steps(view), tiles(view), ...findings(view),
    element("div", { class: "columns" }, news(view), element("div", {}, policies(view), lost(view), processes(view))));
}

function failure({ failure: failed }) {
  if (!failed) return null;
  const lines = failed.traceback ? element("details", { "data-key": "traceback" }, element("summary", {}, "Traceback"), longText(failed.traceback, { most: 8000 })) : null;
  return element("section", { class: "card alarm" }, element("h2", {}, "The error"), longText(failed.error, { most: 4000 }),
    element("p", {}, failed.next_words, " ", element("code", {}, failed.next)), lines);
}

function standstill(view) {
  const causes = view.live?.causes?.length ? view.live.causes : view.standstill?.causes;
  if (!causes || view.state !== "running") return null;
  const seconds = view.live?.idle_s ?? view.standstill.seconds;
  return element("section", { class: "card alarm" }, element("h2", {}, `Nothing has ended for ${duration(seconds)}. The run waits for`),
    element("ul", {}, causes.map((cause) => element("li", {}, cause))));
}

/** One cell a step, or for a few steps: as high as the step was long, by what filled it. */
function steps(view) {
  const { step_s: whole, rollout_s: rollout, overlap_s: both, failed_trajectories: failed } = view.figures;
  if (!whole?.steps.length) return null;
  const longest = Math.max(...whole.mean) || 1;
  const share = (value) => `${(100 * Math.min(1, Math.max(0, value / longest))).toFixed(2)}%`;
  const bars = whole.steps.map((step, place) => {
    const rolled = Math.min(rollout?.mean[place] ?? 0, whole.mean[place]);
    const shared = Math.min(both?.mean[place] ?? 0, rolled);
    const parts = [["rest", whole.mean[place] - rolled], ["both", shared], ["rollout", rolled - shared]].map(([name, seconds]) => {
      const part = element("i", { class: name });
      part.style.height = share(seconds);
      return part;
    });
    const lost = failed?.mean[place] ? `, ${compact(failed.mean[place])} failed trajectories` : "";
    return element("span", { class: lost ? "bar bad" : "bar", title: `step ${step}: ${duration(whole.mean[place])}${lost}` }, parts);
  });
  const label = `Seconds of each step, up to ${duration(longest)}: rollout only, rollout and training at once, the rest`;
  return card(null,
    element("div", { class: "caption" }, element("h2", {}, "Time of the steps"),
      element("ul", { class: "legend" }, [["rollout", "rollout only"], ["both", "rollout and training"], ["rest", "training, weights, rest"]].map(([name, words]) =>
        element("li", {}, element("i", { class: `swatch ${name}` }), words)), element("li", { class: "at" }, `highest ${duration(longest)}`))),
    element("div", { class: "bars", role: "img", "aria-label": label }, bars), progress(view));
}

function progress(view) {
  if (!view.steps) return null;
  return element("progress", { max: view.steps, value: view.step, "aria-label": `step ${view.step} of ${view.steps}` });
}

function tiles(view) {
  const last = (key) => view.figures[key]?.mean.at(-1);
  const left = view.pace_s !== null && view.steps ? Math.max(0, view.steps - view.step) * view.pace_s : null;
  const facts = [
    ["Step", view.steps ? `${view.step} / ${view.steps}` : String(view.step), view.live?.phase ?? (view.state === "running" ? "" : view.state)],
    ["Pace", view.pace_s === null ? "–" : `${duration(view.pace_s)} a step`, view.state === "running" && left ? `${duration(left)} left` : `last step ${duration(last("step_s"))}`],
    ["Tokens", last("tokens_per_s") === undefined ? "–" : `${compact(last("tokens_per_s"))} /s`, "generated, in the last step"],
    ["Overlap", overlap(view), "of the step: rollout and training at once"],
  ];
  return element("dl", { class: "tiles" }, facts.map(([name, value, detail]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, detail)))));
}

function overlap({ figures: { overlap_s: both, step_s: whole } }) {
  if (!both?.mean.length || !whole?.mean.length) return "–";
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  return `${((100 * sum(both.mean)) / (sum(whole.mean) || 1)).toFixed(0)}%`;
}

/** The reasons for slow steps, the most expensive first, and those for learning little. */
function findings(view) {
  const list = (title, found) => (found.length ? card(title, element("ul", { class: "findings" }, found.map((finding) => element("li", {},
    finding.seconds_per_step !== null && finding.key ? element("b", {}, `up to ${duration(finding.seconds_per_step)} a step `) : null,
    finding.sentence, finding.key ? element("code", {}, finding.key) : null)))) : null);
  const isOfTime = (finding) => finding.seconds_per_step !== null;
  return [list("Why so slow", view.findings.filter(isOfTime)), list("What hinders learning", view.findings.filter((finding) => !isOfTime(finding)))];
}

function news(view) {
  const items = view.news.map((line) => element("li", { class: line.warning ? "warning" : null },
    element("time", {}, clock(line.time)), longText(line.text, { most: 400, tag: "span" })));
  const torn = view.unreadable ? element("p", { class: "hint" }, `${view.unreadable} lines of metrics.jsonl and events.jsonl could not be read.`) : null;
  return card("News", items.length ? element("ol", { class: "news" }, items) : element("p", { class: "hint" }, "Nothing yet."), torn);
}

function lost({ failed }) {
  if (!failed) return null;
  const first = failed.first ? element("details", { "data-key": "first" }, element("summary", {}, `The first one: ${failed.first.name}`), longText(failed.first.text, { most: 8000 })) : null;
  return card("Failed trajectories", element("p", {}, `${failed.count} failed and were dropped.`), first);
}

function policies(view) {
  // A run that has ended has no instances: a column of zeros would look like a fault.
  const live = view.live, rows = Object.entries(view.policies).map(([name, version]) => [name, String(version), ...(live ? [String(live.instances[name] ?? 0)] : [])]);
  if (!rows.length) return null;
  return card("Policies", table(["policy", { head: "version", number: true }, ...(live ? [{ head: "instances", number: true }] : [])], rows, "policies"));
}

function processes(view) {
  const rows = Object.entries(view.live?.processes ?? {}).map(([name, process]) => [name, String(process.pid), compact(process.rss_mib), process.host]);
  if (!rows.length) return null;
  return card("Processes", table(["process", { head: "pid", number: true }, { head: "MiB", number: true }, "host"], rows, "processes"));
}
