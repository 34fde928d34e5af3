// The panel Settings: the configs of the runs side by side.

import { card, element, fill, longText, table } from "../dom.js";
import { clock } from "../words.js";

export function open(place, page) {
  const several = page.runs.length > 1;
  const search = element("input", { type: "search", placeholder: "a part of a key or value", value: page.route.get("search") ?? "", input: () => { page.remember({ search: search.value }); show(); } });
  const only = element("input", { type: "checkbox", checked: several, change: () => show() });
  const space = element("div");
  const lives = element("div");
  fill(place, element("h1", { class: "quiet" }, several ? "Settings and their differences" : "Settings"),
    element("form", { class: "controls", submit: (event) => event.preventDefault() }, element("label", { class: "grow" }, "Search", search),
      several ? element("label", { class: "check" }, only, "only the keys that differ") : null), space, lives);
  let views = [];

  function show() {
    const keys = [...new Set(views.flatMap((view) => Object.keys(view.config)))];
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = keys.flatMap((key) => {
      const values = views.map((view) => view.config[key] ?? null);
      const differs = values.some((value) => value !== values[0]);
      if (several && only.checked && !differs) return [];
      const haystack = [key, ...values].join(" ").toLowerCase();
      if (!words.every((word) => haystack.includes(word))) return [];
      return [[element("code", {}, key), ...values.map((value) => element("code", { class: several && differs ? "differs" : null }, value ?? "–"))]];
    });
    const heads = ["key", ...(several ? page.runs.map((run) => page.source.facts.runs[run].name) : ["value"])];
    fill(space, card(null, rows.length ? table(heads, rows, "settings") : element("p", { class: "hint" }, several && only.checked ? "No key differs." : "No key fits.")));
  }

  return {
    async refresh() {
      views = await Promise.all(page.runs.map((run) => page.source.view("settings", run)));
      show();
      fill(lives, views.map((view, index) => card(several ? page.source.facts.runs[page.runs[index]].name : "Lives of the run",
        element("p", { class: "hint" }, view.path),
        view.lives.length ? table(["began", "after step", "machine", "changed since"], view.lives.map((life) => [clock(life.time), String(life.step ?? ""), life.machine,
          longText(Object.entries(life.changes).map(([key, how]) => `${key} ${how}`).join("\n") || "–", { tag: "span" })]), "lives") : null)));
    },
    close() {},
  };
}
