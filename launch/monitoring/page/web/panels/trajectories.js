// The panel Trajectories: a list by filters on one side, a conversation on the other.

import { element, fill, longText, table } from "../dom.js";
import { compact } from "../words.js";

const FILTERS = ["kind", "step", "agent", "reward", "query", "answer", "failed", "order"];
const SHADES = [["", "plain text"], ["logprob", "tokens by probability"], ["version", "tokens by version"]];

export function open(place, page) {
  const run = page.runs[0];
  const state = { rows: [], total: 0, name: null, turn: 0 };
  const list = element("ol", { class: "list", "aria-label": "Trajectories" });
  const count = element("output");
  const detail = element("article", { class: "card conversation", tabindex: -1, "aria-live": "off" });
  const shade = select(SHADES, page.route.get("shade"), () => { page.remember({ shade: shade.value }); show(state.name); });
  const fields = filters(page.route, () => { page.remember(values()); load(); });
  const bar = element("div", { class: "controls" },
    element("button", { type: "button", class: "plain", click: () => step(-1) }, "← previous"),
    element("button", { type: "button", class: "plain", click: () => step(1) }, "next →"),
    element("label", {}, "Show", shade), legend(shade));
  const form = element("form", { class: "controls", submit: (event) => event.preventDefault() }, Object.values(fields).map((field) => field.label));
  if (page.source.isFrozen) form.hidden = shade.parentElement.hidden = true;
  fill(place, element("h1", { class: "quiet" }, "Trajectories", page.runs.length > 1 ? element("small", {}, ` of ${page.source.facts.runs[run].name}`) : null),
    form, element("div", { class: "sides" }, element("div", { class: "card side" }, count, list), element("div", {}, bar, detail)));

  const keys = (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "j") step(1);
    if (event.key === "k") step(-1);
  };
  document.addEventListener("keydown", keys);

  const values = () => Object.fromEntries(FILTERS.map((name) => [name, fields[name].value()]));
  const given = () => Object.fromEntries(Object.entries(values()).filter(([, value]) => value));

  async function load(skip = 0) {
    const turn = ++state.turn;
    try {
      const answer = await page.source.view("trajectories", run, page.source.isFrozen ? {} : { ...given(), ...(skip ? { skip } : {}) });
      if (turn !== state.turn) return;
      page.notice.hidden = true;
      fields.agent.offer(answer.agents);
      state.rows = skip ? [...state.rows, ...answer.rows] : answer.rows;
      state.total = answer.total;
      count.textContent = answer.words || `${answer.total.toLocaleString("en")} ${answer.total === 1 ? "trajectory" : "trajectories"}`;
      draw();
      const wanted = page.route.get("at");
      if (!skip && (!state.name || !wanted)) await show(wanted ?? state.rows[0]?.name ?? null, { quiet: true });
    } catch (error) {
      if (turn !== state.turn) return;
      count.textContent = error.message;
      if (!skip) fill(list);
    }
  }

  function draw() {
    const items = state.rows.map((row) => {
      const facts = [row.evaluation ? `evaluation ${row.step}` : `step ${row.step}`, `${row.turns} turns`, `${compact(row.tokens)} tokens`];
      return element("li", {}, element("a", { href: page.address({ at: row.name }), "aria-current": row.name === state.name ? "true" : null, click: (event) => { event.preventDefault(); show(row.name); } },
        element("b", { class: row.failure ? "bad" : null }, row.failure ? "failed" : row.reward === null ? "–" : compact(row.reward)),
        element("span", {}, `${row.query} · ${row.number}`, element("small", {}, facts.join(" · ")))));
    });
    const rest = state.total - state.rows.length;
    if (rest > 0 && !page.source.isFrozen) items.push(element("li", {}, element("button", { type: "button", class: "plain", click: () => load(state.rows.length) }, `more (${rest.toLocaleString("en")})`)));
    fill(list, items);
  }

  function step(by) {
    const at = state.rows.findIndex((row) => row.name === state.name);
    const row = state.rows[at + by];
    if (row) show(row.name);
  }

  async function show(name, { quiet = false } = {}) {
    if (!name) { fill(detail, element("p", { class: "hint" }, "No trajectory is chosen.")); return; }
    state.name = name;
    if (!quiet) page.remember({ at: name });
    for (const link of list.querySelectorAll("a")) {
      if (link.getAttribute("href") === page.address({ at: name })) {
        link.setAttribute("aria-current", "true");
        link.scrollIntoView({ block: "nearest" });
      } else link.removeAttribute("aria-current");
    }
    try {
      const rest = (part, from) => page.source.view("trajectories", run, { of: name, place: part, from });
      const put = (answer) => { if (state.name === name) conversation(detail, answer, shade.value, rest); };
      put(await page.source.view("trajectories", run, { of: name }));
      // The first tokens wait for a tokenizer, which takes seconds to load.
      if (shade.value && !page.source.isFrozen) put(await page.source.view("trajectories", run, { of: name, tokens: 1 }));
    } catch (error) {
      if (state.name === name) fill(detail, element("p", { class: "notice" }, error.message));
    }
  }

  return {
    refresh: () => load(),
    move() { const at = page.route.get("at"); if (at && at !== state.name) show(at, { quiet: true }); return true; },
    close() { document.removeEventListener("keydown", keys); },
  };
}

function select(options, value, changed) {
  const made = element("select", { change: changed }, options.map(([name, words]) => element("option", { value: name }, words)));
  made.value = options.some(([name]) => name === value) ? value : options[0][0];
  return made;
}

function filters(route, changed) {
  let timer = 0;
  const soon = () => { clearTimeout(timer); timer = setTimeout(changed, 200); };
  const text = (name, words, hint, kind = "text") => {
    const input = element("input", { type: kind, value: route.get(name) ?? "", placeholder: hint, size: 10, input: soon });
    return { label: element("label", { class: name === "query" ? "grow" : null }, words, input), value: () => input.value.trim() };
  };
  const choice = (name, words, options) => {
    const input = select(options, route.get(name), changed);
    const field = { label: element("label", {}, words, input), value: () => input.value };
    field.offer = (names) => {
      const before = input.value || route.get(name) || "";
      fill(input, element("option", { value: "" }, "all"), names.map((agent) => element("option", { value: agent }, agent)));
      input.value = names.includes(before) ? before : "";
    };
    return field;
  };
  return {
    kind: choice("kind", "Of", [["", "all"], ["training", "training"], ["evaluation", "evaluations"]]),
    step: text("step", "Step", "12, 10-20, >100"),
    agent: choice("agent", "Agent", [["", "all"]]),
    reward: text("reward", "Reward", "<0.2, 0.5-1"),
    query: text("query", "Query", "its id or a part of its text", "search"),
    answer: text("answer", "Answer", "a part of an answer", "search"),
    failed: choice("failed", "End", [["", "all"], ["1", "failed"]]),
    order: choice("order", "Order", [["", "newest first"], ["oldest", "oldest first"], ["best", "best first"], ["worst", "worst first"]]),
  };
}

function legend(shade) {
  const place = element("ul", { class: "legend", "aria-live": "polite" });
  const draw = () => fill(place, shade.value === "logprob"
    ? [1, 0.5, 0.2, 0.05, 0.01].map((chance) => element("li", {}, tinted(element("span", { class: "token" }, `p = ${chance}`), Math.log(chance))))
    : shade.value === "version" ? element("li", {}, "a colour for each version that generated tokens of the turn") : null);
  shade.addEventListener("change", draw);
  draw();
  return place;
}

/** The less probable, the redder. */
function tinted(token, logprob) {
  const unlikely = Math.min(1, Math.max(0, -logprob / Math.log(100)));
  token.style.setProperty("--tint", `${(75 * unlikely).toFixed(0)}%`);
  return token;
}

function conversation(place, view, shade, rest) {
  const agents = [...new Set(view.turns.map((turn) => turn.agent))];
  const figures = Object.entries({ ...view.rewards, ...view.metrics });
  const failed = view.failure ? element("div", { class: "notice" }, longText(view.failure, { most: 4000 })) : null;
  fill(place, element("h2", {}, view.title),
    figures.length ? element("ul", { class: "legend" }, figures.map(([name, value]) => element("li", {}, name, element("b", {}, compact(value))))) : null,
    Object.entries(view.metadata).map(([name, value]) => element("p", { class: "hint" }, `${name}: `, longText(value, { most: 300, tag: "span" }))),
    view.turns.map((turn) => turnOf(turn, agents.indexOf(turn.agent), shade, rest)),
    view.hidden_turns ? element("p", { class: "hint" }, `${view.hidden_turns} further turns: flexmarl samples shows them.`) : null,
    view.programs.length ? table(["program", { head: "status", number: true }, { head: "s", number: true }, "problem", "output"],
      view.programs.map((program) => [element("code", {}, program.command), String(program.status), compact(program.seconds), program.problem || "–", longText(program.output, { most: 500 })]), "programs") : null,
    failed);
}

function turnOf(turn, agent, shade, rest) {
  const facts = [
    `turn ${turn.number}`, turn.reward !== null && `reward ${compact(turn.reward)}`,
    turn.advantage !== null && `advantage ${turn.advantage > 0 ? "+" : ""}${compact(turn.advantage)}`,
    `version ${turn.versions.join("…")}`, `${turn.prompt_tokens} + ${turn.count} tokens`,
    turn.left_out && "not trained", turn.is_cut && "cut off at max_new_tokens",
    ...Object.entries(turn.columns).map(([name, value]) => `${name}=${value}`),
  ].filter(Boolean);
  const head = element("p", { class: "who" }, element("b", {}, turn.agent), element("small", {}, facts.join(" · ")));
  head.style.setProperty("--who", `var(--series-${agent % 8})`);
  return element("section", { class: "turn" },
    turn.prompt.map((part, place) => prompt(part, (from) => rest(`${turn.number}.${place}`, from).then((answer) => answer.text))),
    head, shade && turn.tokens ? tokens(turn, shade)
      : longText(turn.text.text, { total: turn.text.total, rest: (from) => rest(String(turn.number), from).then((answer) => answer.text), tag: "div" }));
}

function prompt(part, rest) {
  if (part.kind === "turn") return element("p", { class: "continues" }, `↑ the conversation of turn ${part.turn}${part.is_branch ? ", once more: a branch" : ""}`);
  const body = longText(part.text, { total: part.total, rest, tag: "div" });
  if (part.kind === "text") return element("div", { class: "prompt" }, body);
  return element("div", { class: `prompt role-${["system", "user", "assistant", "tool"].includes(part.role) ? part.role : "other"}` }, element("small", {}, part.role), body,
    part.calls.map((call) => element("p", { class: "call" }, element("small", {}, "calls "), element("code", {}, call))));
}

function tokens(turn, shade) {
  const changes = new Map();
  for (let place = 0; place + 1 < turn.changes.length; place += 2) changes.set(turn.changes[place], turn.changes[place + 1]);
  let version = turn.versions[0];
  const spans = turn.tokens.map((text, place) => {
    version = changes.get(place) ?? version;
    const words = `${text}\nprobability ${Math.exp(turn.logprobs[place]).toPrecision(3)}, log-probability ${turn.logprobs[place]}, version ${version}`;
    const span = element("span", { class: "token", title: words }, text || "∅");
    if (shade === "logprob") tinted(span, turn.logprobs[place]);
    else span.style.background = `color-mix(in srgb, var(--series-${version % 8}) 22%, transparent)`;
    return span;
  });
  const hidden = turn.count - turn.tokens.length;
  return element("div", { class: "text tokens" }, spans, hidden > 0 ? element("small", {}, ` and ${hidden} further tokens`) : null);
}
