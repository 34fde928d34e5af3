// The panel Trajectories: a list by filters on one side, a conversation on the other; of two runs, beside it that of
// the same query in the other run.

import { element, fill, longText, table } from "../dom.js";
import { compact } from "../words.js";

const FILTERS = ["kind", "step", "agent", "reward", "query", "answer", "failed", "order"];
const SHADES = [["", "plain text"], ["logprob", "tokens by probability"], ["difference", "tokens by the difference of trainer and engine"], ["version", "tokens by version"]];

export function open(place, page) {
  const isSeveral = page.runs.length > 1;
  const nameOf = (run) => page.source.facts.runs[run].name;
  const ofRoute = (name, otherwise) => page.runs.find((run) => String(run) === page.route.get(name)) ?? otherwise;
  const state = { run: ofRoute("run", page.runs[0]), rows: [], total: 0, name: null, turn: 0 };
  const list = element("ol", { class: "list", "aria-label": "Trajectories" });
  const count = element("output");
  const detail = element("article", { class: "card conversation", tabindex: -1, "aria-live": "off" });
  const other = besides(page, state, ofRoute("beside", null), () => shade.value);
  const runs = select(page.runs.map((run) => [String(run), nameOf(run)]), String(state.run), () => {
    state.run = Number(runs.value);
    state.name = null;
    page.remember({ run: state.run, at: null, turn: null, beside: null, besideAt: null });
    other.offer(null);
    load();
  });
  const shade = select(SHADES, page.route.get("shade"), () => { page.remember({ shade: shade.value }); show(state.name); });
  const fields = filters(page.route, () => { page.remember(values()); load(); });
  const bar = element("div", { class: "controls" },
    element("button", { type: "button", class: "plain", click: () => step(-1) }, "← previous"),
    element("button", { type: "button", class: "plain", click: () => step(1) }, "next →"),
    element("label", {}, "Show", shade), isSeveral ? other.choice : null, legend(shade));
  const form = element("form", { class: "controls", submit: (event) => event.preventDefault() }, 
    isSeveral ? element("label", {}, "Run", runs) : null, Object.values(fields).map((field) => field.label));
  if (page.source.isFrozen) form.hidden = shade.parentElement.hidden = true;
  fill(place, element("h1", { class: "quiet" }, "Trajectories"), form,
    element("div", { class: "sides" }, element("div", { class: "card side" }, count, list), element("div", {}, bar, element("div", { class: "pair" }, detail, other.card))));

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
      const answer = await page.source.view("trajectories", state.run, page.source.isFrozen ? {} : { ...given(), ...(skip ? { skip } : {}) });
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
      await Promise.all([read(page, state.run, name, shade.value, detail, () => state.name === name, isSeveral), other.show(name)]);
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

/** Shows one trajectory in `place`, first without its tokens: these wait for a tokenizer, which takes seconds to load. */
async function read(page, run, name, shade, place, isWanted, isNamed) {
  const rest = (part, from) => page.source.view("trajectories", run, { of: name, place: part, from });
  const put = (answer) => { if (isWanted()) conversation(place, answer, shade, rest, isNamed ? page.source.facts.runs[run].name : ""); };
  put(await page.source.view("trajectories", run, { of: name }));
  if (shade && !page.source.isFrozen) put(await page.source.view("trajectories", run, { of: name, tokens: 1 }));
}

/** The trajectories of the same query in another run: a choice of the run, and a card with one of them. */
function besides(page, state, run, shade) {
  const nameOf = (number) => page.source.facts.runs[number].name;
  const picks = element("select", { change: () => { page.remember({ besideAt: picks.value }); draw(); } });
  const body = element("div");
  const card = element("article", { class: "card conversation", hidden: run === null, "aria-label": "The other run" },
    element("div", { class: "controls" }, element("label", {}, "Which one", picks)), body);
  const runs = element("select", { change: () => choose() });
  const offer = (chosen) => {
    run = chosen;
    card.hidden = run === null;
    fill(runs, element("option", { value: "" }, "nothing"), page.runs.filter((one) => one !== state.run).map((one) => element("option", { value: one, selected: one === run }, nameOf(one))));
  };
  let order = 0;

  function choose() {
    offer(runs.value === "" ? null : Number(runs.value));
    page.remember({ beside: run, besideAt: null });
    show(state.name);
  }

  async function show(name) {
    const turn = ++order;
    if (run === null || !name) return;
    const { rows } = await page.source.view("trajectories", run, { like: name });
    if (turn !== order) return;
    fill(picks, rows.map((row) => element("option", { value: row.name },
      `${row.evaluation ? "evaluation" : "step"} ${row.step} · ${row.number} · ${row.failure ? "failed" : row.reward === null ? "no reward" : `reward ${compact(row.reward)}`}`)));
    const wanted = page.route.get("besideAt");
    if (rows.some((row) => row.name === wanted)) picks.value = wanted;
    if (rows.length) await draw();
    else fill(body, element("p", { class: "hint" }, `${nameOf(run)} has no trajectory of this query.`));
  }

  async function draw() {
    const turn = ++order;
    try {
      await read(page, run, picks.value, shade(), body, () => turn === order, true);
    } catch (error) {
      if (turn === order) fill(body, element("p", { class: "notice" }, error.message));
    }
  }

  offer(run === state.run ? null : run);
  return { choice: element("label", {}, "Beside it", runs), card, offer, show };
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
    return { label: element("label", { class: ["query", "answer"].includes(name) ? "grow" : null }, words, input), value: () => input.value.trim() };
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
    kind: choice("kind", "Kind", [["", "all"], ["training", "training"], ["evaluation", "evaluations"]]),
    step: text("step", "Step", "12, 10-20"),
    agent: choice("agent", "Agent", [["", "all"]]),
    reward: text("reward", "Reward", "<0.2, 0.5-1"),
    query: text("query", "Query", "its id or a part of its text", "search"),
    answer: text("answer", "Answer", "a part of an answer", "search"),
    failed: choice("failed", "Outcome", [["", "all"], ["1", "failed"]]),
    order: choice("order", "Order", [["", "newest first"], ["oldest", "oldest first"], ["best", "best first"], ["worst", "worst first"]]),
  };
}

function legend(shade) {
  const place = element("ul", { class: "legend", "aria-live": "polite" });
  const draw = () => fill(place, shade.value === "logprob"
    ? [1, 0.5, 0.2, 0.05, 0.01].map((chance) => element("li", {}, tinted(element("span", { class: "token" }, `p = ${chance}`), Math.log(chance))))
    : shade.value === "difference"
      ? [element("li", {}, "trainer and engine differ in the log-probability by"), ...[0.001, 0.01, 0.1, 1].map((gap) =>
        element("li", {}, apart(element("span", { class: "token" }, gap === 1 ? "1 or more" : gap === 0.001 ? "0.001 or less" : String(gap)), gap)))]
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

/** The more trainer and engine differ, the redder: a third of the scale for every tenfold. */
function apart(token, difference) {
  const redness = Math.min(1, Math.max(0, (Math.log10(Math.abs(difference)) + 3) / 3));
  token.style.setProperty("--tint", `${Number.isFinite(difference) ? (75 * redness).toFixed(0) : 75}%`);
  return token;
}

function conversation(place, view, shade, rest, run) {
  const agents = [...new Set(view.turns.map((turn) => turn.agent))];
  const figures = Object.entries({ ...view.rewards, ...view.metrics });
  const failed = view.failure ? element("div", { class: "notice" }, longText(view.failure, { most: 4000 })) : null;
  fill(place, run ? element("p", { class: "hint run-of" }, run) : null, element("h2", {}, view.title),
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
    turn.difference && `trainer${turn.versions.includes(turn.trainer_version) ? "" : ` (version ${turn.trainer_version})`} differs by ${figure(turn.difference.mean)} a token`,
    turn.left_out && "not trained", turn.is_cut && "cut off at max_new_tokens",
    ...Object.entries(turn.columns).map(([name, value]) => `${name}=${value}`),
  ].filter(Boolean);
  const head = element("p", { class: "who" }, element("b", {}, turn.agent), element("small", {}, facts.join(" · ")));
  head.style.setProperty("--who", `var(--series-${agent % 8})`);
  return element("section", { class: "turn" },
    turn.prompt.map((part, place) => prompt(part, (from) => rest(`${turn.number}.${place}`, from).then((answer) => answer.text))),
    head, shade && turn.tokens ? tokens(turn, shade)
      : !turn.text.total ? element("p", { class: "hint" }, "an empty answer")
      : longText(turn.text.text, { total: turn.text.total, rest: (from) => rest(String(turn.number), from).then((answer) => answer.text), tag: "div" }));
}

function prompt(part, rest) {
  if (part.kind === "turn") return element("p", { class: "continues" }, `↑ the conversation of turn ${part.turn}${part.is_branch ? ", once more: a branch" : ""}`);
  const body = longText(part.text, { total: part.total, rest, tag: "div" });
  if (part.kind === "text") return element("div", { class: "prompt" }, body);
  return element("div", { class: `prompt role-${["system", "user", "assistant", "tool"].includes(part.role) ? part.role : "other"}` }, element("small", {}, part.role), body,
    part.calls.map((call) => element("p", { class: "call" }, element("small", {}, "calls "), element("code", {}, call))));
}

/** The tokens of a turn in colours. Arrow keys move from one to the next; the line below says what is known of it. */
function tokens(turn, shade) {
  const changes = new Map();
  for (let place = 0; place + 1 < turn.changes.length; place += 2) changes.set(turn.changes[place], turn.changes[place + 1]);
  const versions = [];
  turn.tokens.forEach((_, place) => versions.push(changes.get(place) ?? versions.at(-1) ?? turn.versions[0]));
  const isCompared = turn.differences?.length > 0;
  const facts = (place) => [
    `probability ${Math.exp(turn.logprobs[place]).toPrecision(3)}`, `log-probability ${turn.logprobs[place]}`,
    isCompared && `trainer ${turn.differences[place] < 0 ? "−" : "+"}${figure(Math.abs(turn.differences[place]))}`, `version ${versions[place]}`,
  ].filter(Boolean).join(", ");
  const spans = turn.tokens.map((text, place) => {
    const span = element("span", { class: "token", title: `${text}\n${facts(place)}` }, text || "∅");
    if (shade === "logprob") tinted(span, turn.logprobs[place]);
    else if (shade === "difference") { if (isCompared) apart(span, turn.differences[place]); }
    else span.style.background = `color-mix(in srgb, var(--series-${versions[place] % 8}) 22%, transparent)`;
    return span;
  });
  const said = element("output", { class: "token-facts" });
  let at = -1;
  const move = (to) => {
    spans[at]?.classList.remove("chosen");
    at = Math.max(0, Math.min(spans.length - 1, to));
    spans[at].classList.add("chosen");
    spans[at].scrollIntoView({ block: "nearest" });
    said.textContent = `token ${at + 1} of ${turn.count}, ${JSON.stringify(turn.tokens[at])}: ${facts(at)}`;
  };
  const text = element("div", { class: "text tokens", tabindex: 0, role: "group", "aria-label": `tokens of turn ${turn.number}; arrow keys move` }, spans);
  text.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, PageDown: at + 20, PageUp: at - 20, Home: 0, End: spans.length - 1 };
    if (!(event.key in moves) || !spans.length) return;
    event.preventDefault();
    move(moves[event.key]);
  });
  text.addEventListener("click", (event) => { const place = spans.indexOf(event.target); if (place >= 0) move(place); });
  const hidden = turn.count - turn.tokens.length;
  if (hidden > 0) text.append(element("small", {}, ` and ${hidden} further tokens`));
  const most = turn.difference;
  const jump = shade !== "difference" ? null
    : !isCompared ? element("p", { class: "hint" }, "The trainer has computed no log-probabilities of this turn: it has no advantage, is of an evaluation, or is not trained yet.")
    : element("p", { class: "hint" }, most.place < spans.length
      ? element("button", { type: "button", class: "plain", click: () => { move(most.place); text.focus({ preventScroll: true }); } }, `at most ${figure(most.most)}, at token ${most.place + 1}`)
      : `at most ${figure(most.most)}, at token ${most.place + 1}`);
  return element("div", {}, jump, text, said);
}

function figure(value) {
  return value === 0 ? "0" : value >= 0.001 ? String(Number(value.toPrecision(2))) : value.toExponential(0);
}
