"""The report of a run: one HTML file that stands alone, written from the run folder.

Reads ``metrics.jsonl``, ``events.jsonl`` and ``config.yaml`` (each may be missing or cut short) and writes
``report.html`` next to them. `run_history.py` says what the keys mean; `charts.py` draws.
"""

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from ..formatting import change, clock, compact, count, duration, listed
from .charts import (
    Axes,
    Band,
    Line,
    Point,
    box_swatch,
    column_chart,
    columns,
    figure,
    legend,
    line_chart,
    line_swatch,
    share_bar,
    smooth,
    thin,
)
from .run_history import PARTS, History, Part, first_and_last, load_history

_POINTS = 400  # a curve never has more: about one per two pixels
_COLUMNS = 60
_RAW_CURVES = 6  # with more agents the unsmoothed curves hide one another and are left out
_EVENTS_SHOWN = 200
_AGENTS_NAMED = 8
_PART_COLORS: dict[Part, str] = {
    "rollout only": "c0",
    "rollout and training": "c2",
    "training only": "c1",
    "optimizer": "c5",
    "publishing weights": "c3",
    "other": "grey",
}


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` and return its path.

    The file appears whole or not at all (written aside, then renamed). Raises `OSError` where the folder is
    not there or can't be written; missing or half-written inputs are named in the report instead.
    """
    history = load_history(run_dir)
    template = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    page = template.substitute(title=escape(f"{history.name}: report"), body=render_body(history))
    target = run_dir / "report.html"
    aside = target.with_name(f".report.html.{os.getpid()}.tmp")
    try:
        aside.write_text(page, encoding="utf-8", errors="replace")
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    return target


def render_body(history: History) -> str:
    """The report without its frame, as HTML. Pure."""
    sections = (
        _header,
        _facts,
        _agents,
        _rewards,
        _accuracy,
        _time,
        _throughput,
        _processes,
        _failures,
        _events,
        _config,
    )
    return "\n".join(part for part in (section(history) for section in sections) if part)


# --------------------------------------------------------------------------- words


# Shown where there were any.
_RARE_FACTS = (
    ("Carried-on turns", "resumed_turns", "begun by one version, ended by a later one"),
    ("Oversampled trajectories", "oversampled_trajectories", "started beyond a group's size, not used"),
    ("Replaced trajectories", "replaced_trajectories", "in place of those that overran"),
    ("Dropped groups", "dropped_groups", "without signal, or with too few survivors"),
    ("Replaced queries", "replaced_queries", "in place of dropped groups"),
)


def _header(history: History) -> str:
    started = history.events_named("run_started")
    when = f" · started {clock(started[0].get('time'))}" if started else ""
    mode = f" · mode {history.mode}" if history.mode else ""
    return (
        f"<header><p>flexmarl run <strong>{escape(history.name)}</strong>{escape(mode)}{escape(when)}"
        f"{escape(_ending(history))}</p><h1>{escape(_headline(history))}</h1>"
        f'<p class="lead">{escape(_reward_words(history))}</p></header>'
    )


def _headline(history: History) -> str:
    if not history.steps:
        return "No training step has finished"
    steps = count(history.steps, "step")
    accuracy = history.column("eval/accuracy")
    if len(accuracy) >= 2:
        before, after = accuracy[0][1], accuracy[-1][1]
        return f"Accuracy {change(before, after, '.1%')} in {steps}"
    rewards = [first_and_last(history.column(f"reward/{agent}")) for agent in history.agents]
    known = [ends for ends in rewards if ends]
    if not known:
        return f"{steps} finished"
    first, last = (sum(ends[side] for ends in known) / len(known) for side in (0, 1))
    if history.steps == 1:
        return f"Mean reward {first:.3f} after 1 step"
    return f"Mean reward {change(first, last, '.3f')} in {steps}"


def _reward_words(history: History) -> str:
    words: list[str] = []
    if history.steps < 2:
        return ""
    for agent in history.agents[:_AGENTS_NAMED]:
        ends = first_and_last(history.column(f"reward/{agent}"))
        if ends:
            words.append(f"{agent} {ends[0]:.3f} → {ends[1]:.3f}")
    if not words:
        return ""
    left = len(history.agents) - _AGENTS_NAMED
    more = f" and {count(left, 'more agent')}" if left > 0 else ""
    return f"Reward, first 5% of the steps → last 5%: {', '.join(words)}{more}."


def _ending(history: History) -> str:
    turns = [event.get("event") for event in history.events]
    turns = [turn for turn in turns if turn in ("run_started", "run_resumed", "run_ended")]
    if turns and turns[-1] == "run_ended":
        return ""
    return " · no end recorded: still running, or stopped"


def _facts(history: History) -> str:
    """The key figures. Shares are of the time spent in steps."""
    if not history.steps:
        return ""
    resumed = f"resumed at {listed(history.resumes)}" if history.resumes else ""
    facts = [("Steps", str(history.steps), resumed)]
    facts.append(("Wall time", duration(history.wall_s), "from the first step to the last"))
    if history.tokens and history.step_seconds:
        speed = f"{compact(history.tokens / history.step_seconds)} tokens/s"
        facts.append(("Throughput", speed, f"{compact(history.tokens)} tokens"))
    if history.step_seconds and history.has("overlap_s"):
        overlap = history.total("overlap_s")
        share = f"{overlap / history.step_seconds:.1%} of step time: rollout and training at once"
        facts.append(("Overlap", duration(overlap), share))
    failed, stale = history.total("failed_trajectories"), history.total("stale_samples")
    facts.append(("Failed trajectories", f"{failed:g}", "dropped, not trained on"))
    oldest = max((age for _, age in history.column("max_staleness")), default=0.0)
    detail = f"by {count(int(oldest), 'version')} at most" if stale else "generated by an older version"
    facts.append(("Stale samples", f"{stale:g}", detail))
    facts += [
        (name, f"{total:g}", detail) for name, key, detail in _RARE_FACTS if (total := history.total(key))
    ]
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(detail)}</small></dd></div>"
        for name, value, detail in facts
    )
    return f'<dl class="facts">{cells}</dl>'


# --------------------------------------------------------------------------- agents


# Key, heading, format; a column that no agent has is left out.
_MEASURED = (
    ("nonzero_advantage_share", "with signal", ".0%"),
    ("loss", "loss", ".3g"),
    ("grad_norm", "grad norm", ".3g"),
    ("mean_tokens", "tokens a turn", ".1f"),
    ("clip_fraction", "clipped", ".2%"),
    ("ratio_deviation", "engine against trainer", ".2g"),
    ("value_loss", "value loss", ".3g"),
    ("explained_variance", "explained variance", ".3g"),
)


def _agents(history: History) -> str:
    measured = [
        column for column in _MEASURED if any(history.has(f"{column[0]}/{agent}") for agent in history.agents)
    ]
    rows = []
    for agent in history.agents:
        reward = first_and_last(history.column(f"reward/{agent}"))
        first, last = (f"{value:.3f}" for value in reward) if reward else ("–", "–")
        version, samples = history.versions.get(agent, "–"), history.total(f"samples/{agent}")
        row = [agent, str(version), first, last, compact(samples)]
        for key, _, form in measured:
            ends = first_and_last(history.column(f"{key}/{agent}"))
            row.append(format(ends[1], form) if ends else "–")
        rows.append(row)
    if not rows:
        return ""
    heads = ["agent", "version", "reward, first 5%", "reward, last 5%", "samples"]
    heads += [f"{head}*" for _, head, _ in measured]
    note = (
        "* Mean of the last 5% of the steps. With signal: share of samples whose advantage is not zero. Clipped: share "
        "of tokens. Engine against trainer: mean of |ratio - 1| of a token's two probabilities."
    )
    return f"<h2>Agents</h2>{_table(heads, rows)}{_note(note)}"


def _rewards(history: History) -> str:
    curves = {agent: history.column(f"reward/{agent}") for agent in history.agents}
    curves = {agent: points for agent, points in curves.items() if points}
    if not curves:
        return ""
    half_width = max(0, history.steps // 50)
    lines = []
    for index, (agent, points) in enumerate(curves.items()):
        if half_width and len(curves) <= _RAW_CURVES:
            lines.append(Line(agent, thin(points, _POINTS), index, raw=True))
        lines.append(Line(agent, _evenly(smooth(points, half_width)), index))
    note = f"Bold: running mean over {2 * half_width + 1} steps." if half_width else "Every step as measured."
    if any(line.raw for line in lines):
        note += " Thin: every step."
    if history.resumes:
        note += " Dotted vertical lines: the run was resumed there."
    axes = Axes(
        name="reward",
        title="Reward per agent over the steps",
        description=_reward_words(history),
        x_label="step",
        y_label="mean reward",
        y_range=_unit_range([y for points in curves.values() for _, y in points]),
        marks=history.resumes,
    )
    entries = [(line_swatch(index), agent) for index, agent in enumerate(curves)]
    return f"<h2>Reward</h2>{figure(lambda width: line_chart(axes, lines, width), note, legend(entries))}"


def _accuracy(history: History) -> str:
    points = history.column("eval/accuracy")
    if not points:
        return ""
    axes = Axes(
        name="accuracy",
        title="Accuracy of the evaluations",
        description=", ".join(f"step {x:g}: {y:.1%}" for x, y in points[:50]),
        x_label="step",
        y_label="accuracy",
        y_range=(0.0, 1.0),
        y_format=lambda value: f"{100 * value:.3g}%",
        marks=history.resumes,
    )
    line = Line("accuracy", _evenly(points), 0, dots=len(points) <= 60)
    note = count(len(points), "evaluation") + ("; step 0 is before training." if points[0][0] == 0 else ".")
    return f"<h2>Accuracy</h2>{figure(lambda width: line_chart(axes, [line], width), note)}"


# --------------------------------------------------------------------------- time


def _time(history: History) -> str:
    """Where the seconds of a step went: a bar for the run, columns over the steps, a table, definitions."""
    split = history.time_split()
    totals = {part: sum(y for _, y in split[part]) for part in PARTS}
    whole = sum(totals.values())
    if not whole:
        return ""
    shares = [(part, totals[part] / whole, _PART_COLORS[part]) for part in PARTS]
    entries = [(box_swatch(css), f"{part} {share:.1%}") for part, share, css in shares]
    bar = figure(lambda width: share_bar("share", "Share of step time", shares, width), key=legend(entries))
    steps = len(split["other"])
    rows = [
        [part, f"{1000 * totals[part] / steps:.3g} ms", f"{share:.1%}", duration(totals[part])]
        for part, share, _ in shares
    ]
    table = _table(["part", "per step", "share", "whole run"], rows)
    return f"<h2>Where the time went</h2>{bar}{_time_columns(history, split)}{table}{_note(_SPLIT_WORDS)}"


def _time_columns(history: History, split: Mapping[Part, Sequence[Point]]) -> str:
    first, end = split["other"][0][0], split["other"][-1][0] + 1
    number = int(min(_COLUMNS, end - first))
    edges = [float(first + round(index * (end - first) / number)) for index in range(number + 1)]
    bands = [
        Band(part, [1000 * y for y in columns(split[part], edges)], _PART_COLORS[part]) for part in PARTS
    ]
    axes = Axes(
        name="time",
        title="Milliseconds per step, by what they were spent on",
        description=f"means of {number} stretches of steps; the table below holds the totals",
        x_label="step",
        y_label="ms per step",
        marks=history.resumes,
    )
    per_column = (end - first) / number
    note = f"Each column is the mean of about {per_column:.0f} steps." if per_column > 1 else ""
    return figure(lambda width: column_chart(axes, edges, bands, width), note)


_SPLIT_WORDS = (
    "Measured: “rollout and training” is the overlap, when an agent trained while trajectories were being "
    "generated; “rollout only” is the rest of the rollout. Estimated: the wall time after the rollout is "
    "shared out by the agents’ own clocks (forward/backward beyond the overlap, optimizer, publishing), "
    "added up over the agents and scaled down together where agents worked at once. What no clock covers is "
    "“other”: waiting, messages, bookkeeping."
)


def _throughput(history: History) -> str:
    points = history.column("tokens_per_s")
    if not points:
        return ""
    half_width = max(0, history.steps // 50)
    lines = [Line("tokens/s", _evenly(smooth(points, half_width)), 0)]
    if half_width:
        lines.insert(0, Line("tokens/s", thin(points, _POINTS), 0, raw=True))
    mean = sum(y for _, y in points) / len(points)
    axes = Axes(
        name="tokens",
        title="Generated tokens per second",
        description=f"mean over the steps: {compact(mean)} tokens/s",
        x_label="step",
        y_label="tokens/s",
        marks=history.resumes,
    )
    note = f"Mean over the steps: {compact(mean)} tokens/s."
    return f"<h2>Throughput</h2>{figure(lambda width: line_chart(axes, lines, width), note)}"


def _processes(history: History) -> str:
    rows = []
    for process in history.names("loop_lag_ms/", "rss_mib/"):
        lag = sorted(y for _, y in history.column(f"loop_lag_ms/{process}"))
        rss = [y for _, y in history.column(f"rss_mib/{process}")]
        lags = (sum(lag) / len(lag), lag[int(0.99 * (len(lag) - 1))], lag[-1]) if lag else ()
        sizes = (rss[0], rss[-1], max(rss)) if rss else ()
        row = [process, *(f"{value:.2f}" for value in lags)] + ["–"] * (3 - len(lags))
        rows.append(row + [f"{value:.0f}" for value in sizes] + ["–"] * (3 - len(sizes)))
    if not rows:
        return ""
    heads = ["process", "loop lag, mean ms", "p99 ms", "max ms", "memory, first MiB", "last MiB", "max MiB"]
    note = "Loop lag: how late the event loop of the process ran. Memory: resident set size."
    return f"<h2>Processes</h2>{_table(heads, rows)}{_note(note)}"


# --------------------------------------------------------------------------- what went wrong, and the rest


def _failures(history: History) -> str:
    failed, events = history.total("failed_trajectories"), history.events_named("trajectory_failed")
    parts = []
    if failed or events:
        parts.append(f"<p>{max(int(failed), len(events))} failed and were dropped.</p>")
    elif history.steps:
        parts.append("<p>None.</p>")
    if events:
        first = dict(events[0])
        trace = next((str(first.pop(key)) for key in ("traceback", "error", "reason") if first.get(key)), "")
        fields = _fields(first)
        parts.append(_note(f"The first one: {fields}" if fields else "The first one:"))
        parts.append(f"<pre>{escape(trace)}</pre>" if trace else "")
    if history.unreadable:
        lines = count(history.unreadable, "line")
        parts.append(f'<p class="bad">{lines} of metrics.jsonl and events.jsonl could not be read.</p>')
    return f"<h2>Failed trajectories</h2>{''.join(parts)}" if parts else ""


def _events(history: History) -> str:
    if not history.events:
        return ""
    rows = []
    for event in history.events[:_EVENTS_SHOWN]:
        details = _fields({key: value for key, value in event.items() if key != "traceback"})
        rows.append([clock(event.get("time")), str(event.get("event", "")), details])
    left = len(history.events) - len(rows)
    more = _note(f"{left} later ones are in events.jsonl.") if left > 0 else ""
    table = _table(["time", "event", "details"], rows, css="words")
    return f"<details><summary>Events ({len(history.events)})</summary>{table}{more}</details>"


def _config(history: History) -> str:
    if not history.config_text:
        return ""
    text = f"<pre>{escape(history.config_text)}</pre>"
    return f"<details><summary>Configuration, as resolved</summary>{text}</details>"


# --------------------------------------------------------------------------- small pieces


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], css: str = "numbers") -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heads)
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    inside = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table class="{css}">{inside}</table></div>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _evenly(points: Sequence[Point]) -> list[Point]:
    """At most about `_POINTS` of the points, evenly spaced, the last among them."""
    stride = max(1, -(-len(points) // _POINTS))
    kept = list(points[::stride])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def _unit_range(values: Sequence[float]) -> Point | None:
    """[0, 1] for rewards that live there, so that runs compare at a glance."""
    return (0.0, 1.0) if values and min(values) >= 0 and 0.25 < max(values) <= 1 else None


def _fields(event: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}: {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in event.items()
        if key not in ("time", "event")
    )
