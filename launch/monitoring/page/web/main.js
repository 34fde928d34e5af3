// The frame of the page: runs, panels, theme. The address says all that is shown, so that a link can be sent.

import { element, fill, oncePerFrame } from "./dom.js";
import { openSource } from "./source.js";

const THEME = "flexmarl-theme";

class Page {
  constructor(source) {
    this.source = source;
    this.panel = null;
    this.opened = null;
    this.content = document.getElementById("content");
    this.notice = element("p", { class: "notice", role: "status", hidden: true });
    this.state = element("span", { class: "live", role: "status" });
  }

  /** The places of the runs that are shown. */
  get runs() {
    const all = this.source.facts.runs.map((_, place) => place);
    const chosen = (this.route.get("runs") ?? "").split(".").filter(Boolean).map(Number).filter((run) => all.includes(run));
    return chosen.length ? chosen : all;
  }

  /** The parameters in the address, behind the name of the panel. */
  get route() {
    return new URLSearchParams(location.hash.slice(1).split("?")[1] ?? "");
  }

  get panelName() {
    const name = location.hash.slice(1).split("?")[0];
    const panels = this.source.facts.panels.map((panel) => panel.name);
    return panels.includes(name) ? name : panels[0];
  }

  /** The address with other parameters; a parameter that is null or empty is left out. */
  address(parameters, panel = this.panelName) {
    const route = panel === this.panelName ? this.route : new URLSearchParams(this.route.has("runs") ? { runs: this.route.get("runs") } : {});
    for (const [name, value] of Object.entries(parameters)) {
      if (value === null || value === undefined || value === "") route.delete(name);
      else route.set(name, value);
    }
    const text = route.toString();
    return `#${panel}${text ? `?${text}` : ""}`;
  }

  /** Puts parameters into the address, without a step in the browser's history. */
  remember(parameters) {
    history.replaceState(null, "", this.address(parameters));
  }

  /** Shows an error of a request. The page stays as it is. */
  report(error) {
    this.notice.textContent = error.message;
    this.notice.hidden = false;
  }

  start() {
    document.documentElement.dataset.theme = storedTheme();
    this.frame();
    window.addEventListener("hashchange", () => this.show());
    this.source.follow((grown) => this.grow(grown), (isConnected) => this.connect(isConnected));
    return this.show();
  }

  frame() {
    const { runs } = this.source.facts;
    this.tabs = element("nav", { "aria-label": "Panels" });
    this.ticks = runs.length > 1 ? element("fieldset", { class: "runs" }, element("legend", {}, "Runs")) : null;
    const theme = element("button", { type: "button", class: "theme", "aria-label": "Light or dark", click: () => this.turn() }, "◐");
    const brand = element("span", { class: "brand" }, "flexmarl");
    const name = element("span", { class: "run" }, runs.length === 1 ? runs[0].name : `${runs.length} runs`);
    fill(document.getElementById("top"), element("div", { class: "line" }, brand, name, this.state, theme), this.tabs, this.ticks);
    document.title = `${runs.map((run) => run.name).join(", ")} · flexmarl`;
    if (this.source.isFrozen) this.state.textContent = "as of its last step";
    this.frameRuns();
  }

  frameRuns() {
    if (!this.ticks) return;
    const shown = new Set(this.runs);
    const boxes = this.source.facts.runs.map((run, place) => {
      const box = element("input", { type: "checkbox", checked: shown.has(place), value: place, change: () => this.tick() });
      const swatch = element("i", { class: "swatch" });
      swatch.style.background = `var(--series-${place % 8})`;
      return element("label", { title: run.path }, box, swatch, run.name);
    });
    fill(this.ticks, element("legend", {}, "Runs"), boxes);
  }

  tick() {
    const chosen = [...this.ticks.querySelectorAll("input:checked")].map((box) => box.value);
    location.hash = this.address({ runs: chosen.length === this.source.facts.runs.length ? null : chosen.join(".") });
  }

  turn() {
    const isDark = getComputedStyle(document.documentElement).colorScheme.trim() === "dark";
    const theme = isDark ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try { localStorage.setItem(THEME, theme); } catch { /* a file's page may have no storage */ }
    this.opened?.refresh();
  }

  connect(isConnected) {
    this.state.textContent = isConnected ? "connected" : "no connection";
    this.state.classList.toggle("off", !isConnected);
  }

  grow(grown) {
    if (grown.some((run) => this.runs.includes(run))) this.refreshSoon ??= oncePerFrame(() => this.opened?.refresh());
    this.refreshSoon?.();
  }

  async show() {
    const name = this.panelName;
    const key = `${name}?${this.runs}`;
    fill(this.tabs, this.source.facts.panels.map((panel) =>
      element("a", { href: this.address({}, panel.name), "aria-current": panel.name === name ? "page" : null }, panel.title)));
    this.frameRuns();
    if (key === this.key && this.opened?.move?.()) return;
    this.key = key;
    this.opened?.close();
    this.opened = null;
    this.notice.hidden = true;
    const place = element("div", { class: `panel ${name}` });
    try {
      const module = await import(`./panels/${name}.js`);
      if (this.key !== key) return;
      fill(this.content, this.notice, place);
      this.opened = module.open(place, this);
      await this.opened.refresh();
    } catch (error) {
      fill(this.content, this.notice, place);
      this.report(error);
    }
    window.scrollTo(0, 0);
  }
}

function storedTheme() {
  try { return localStorage.getItem(THEME) ?? ""; } catch { return ""; }
}

openSource().then((source) => new Page(source).start()).catch((error) => {
  fill(document.getElementById("content"), element("p", { class: "notice" }, `The page could not be read: ${error.message}`));
});
