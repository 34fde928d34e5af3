// The panel Figures: every figure of the run, found by a word of its name or meaning.

import { Board, controls } from "../board.js";
import { element, fill } from "../dom.js";
import { merged } from "../layout.js";

const HEADINGS = {
  step: "The step", evaluation: "Evaluations", agent: "Agents", policy: "Policies", opponent: "Past versions",
  workflow: "The workflow’s metrics", source: "The query source", actor: "Actors", process: "Processes", device: "GPUs",
};

export function open(place, page) {
  const search = element("input", { type: "search", placeholder: "name or meaning, such as loss, queue or tokens", value: page.route.get("search") ?? "", input: () => { page.remember({ search: search.value }); show(); } });
  const subject = element("select", { change: () => { page.remember({ of: subject.value }); show(); } });
  const count = element("output");
  const space = element("div");
  const bar = controls(page, () => board.redraw(), element("label", { class: "grow" }, "Search", search), element("label", {}, "Of", subject));
  const board = new Board(space, page, bar.options);
  fill(place, element("h1", { class: "quiet" }, "Figures"), bar.place, count, space);
  let charts = [];

  function show() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = charts.filter((chart) => (!subject.value || chart.group === subject.value)
      && words.every((word) => chart.haystack.includes(word)));
    count.textContent = `${chosen.length} of ${charts.length} figures`;
    board.show(chosen, HEADINGS);
  }

  return {
    async refresh() {
      const views = await Promise.all(page.runs.map((run) => page.source.view("figures", run)));
      const lists = views.map((view) => view.charts.map((chart) => ({ ...chart, group: chart.subject, percent: chart.unit === "share" })));
      charts = merged(lists).map((chart) => ({
        ...chart, haystack: [chart.title, chart.meaning, chart.unit, ...chart.series.map((series) => series.label)].join(" ").toLowerCase(),
      }));
      const before = subject.value || page.route.get("of") || "";
      fill(subject, element("option", { value: "" }, "everything"), [...new Set(charts.map((chart) => chart.group))].map((group) =>
        element("option", { value: group }, HEADINGS[group] ?? group)));
      subject.value = before;
      show();
    },
    close() { board.close(); },
  };
}
