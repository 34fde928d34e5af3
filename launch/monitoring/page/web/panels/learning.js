// The panel Learning: does it become better?

import { Board, controls } from "../board.js";
import { element, fill } from "../dom.js";
import { merged } from "../layout.js";

const HEADINGS = {
  evaluation: "Evaluations", reward: "Rewards in training", opponents: "Past versions", workflow: "Metrics of the workflow",
  policy: "Policies", agent: "Agents",
};

export function open(place, page) {
  const title = element("div", { class: "hero" });
  const space = element("div");
  const bar = controls(page, () => board.redraw());
  const board = new Board(space, page, bar.options);
  fill(place, title, bar.place, space);
  return {
    async refresh() {
      const views = await Promise.all(page.runs.map((run) => page.source.view("learning", run)));
      fill(title, views.length === 1 ? element("h1", {}, views[0].headline) : element("ul", { class: "headlines" }, views.map((view, index) =>
        element("li", {}, element("b", {}, page.source.facts.runs[page.runs[index]].name), ` ${view.headline}`))),
        views.every((view) => view.held_out) ? element("p", { class: "lead" }, "Evaluated on problems that training never uses.") : null);
      board.show(merged(views.map((view) => view.charts)), HEADINGS);
      if (!board.tiles.size) fill(space, element("p", { class: "hint" }, "No step has finished yet."));
    },
    close() { board.close(); },
  };
}
