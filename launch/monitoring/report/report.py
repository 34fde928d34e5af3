"""Writes the report of a run: one HTML file without any other files, ``report.html`` in the run folder."""

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from ....actors.run_events import (
    ActorGivenUp,
    ActorMoved,
    NodeLost,
    NodeRefused,
    RunEnded,
    RunResumed,
    RunStarted,
    TrajectoryFailed,
)
from ....core.durable.files import replace_private
from ...run.run_endings import evaluated_names
from ..console.event_text import warning_of
from ..formatting import OF_REWARDS, change, clock, compact, count, duration, format_numbers
from .evaluation_sections import evaluations
from .instance_sections import instances
from .page_parts import note, table
from .pool_sections import COPIES, pool
from .run_history import History, load_history
from .time_sections import processes, throughput, time_split, turn_times
from .training_charts import other_curves, policy_curves, rewards, turn_curves
from .training_sections import agents_and_policies, mean_rewards, reward_caption
from .trajectory_sections import evaluated_trajectories

_EVENTS_SHOWN = 200
_HOSTS_SHOWN = 20


def write_report(run_dir: Path) -> Path:
    """Writes ``run_dir/report.html`` and returns its path.

    The file appears whole or not at all: it is written under another name and renamed. Raises OSError if the folder is
    missing or read-only; missing or half-written inputs are named in the report instead.
    """
    history = load_history(run_dir)
    body = render_body(history, evaluated_trajectories(run_dir))
    template = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    page = template.substitute(title=escape(f"{history.name}: report"), body=body)
    target = run_dir / "report.html"
    replace_private(target, page.encode(errors="replace"))
    return target


def render_body(history: History, trajectories: str = "") -> str:
    """The report without its frame, as HTML. ``trajectories``: their section. Pure."""
    sections = (
        _header,
        _failure,
        _hosts,
        _facts,
        agents_and_policies,
        evaluations,
        rewards,
        other_curves,
        policy_curves,
        turn_curves,
        time_split,
        throughput,
        turn_times,
        instances,
        pool,
        processes,
        lambda _: trajectories,
        _failures,
        _events,
        _config,
    )
    return "\n".join(part for part in (section(history) for section in sections) if part)


# --------------------------------------------------------------------------- the top of the page


def _header(history: History) -> str:
    started = [logged for logged in history.events if isinstance(logged.event, RunStarted)]
    when = f" · started {clock(started[0].line.get('time'))}" if started else ""
    mode = f" · mode {history.mode}" if history.mode else ""
    return (
        f"<header><p>flexmarl run <strong>{escape(history.name)}</strong>{escape(mode)}{escape(when)}"
        f"{escape(_ending(history))}</p><h1>{escape(_headline(history))}</h1>"
        f'<p class="lead">{escape(reward_caption(history))}</p></header>'
    )


def _failure(history: History) -> str:
    """The error that has ended the run, above everything else."""
    ended = history.failure
    if ended is None:
        return ""
    frames = ended.traceback.rstrip() if ended.traceback else ""
    traceback = (
        f"<details><summary>Traceback</summary><pre>{escape(frames)}</pre></details>" if frames else ""
    )
    return f'<section class="failure"><h2>The error</h2><pre>{escape(ended.error or "")}</pre>{traceback}</section>'


def _hosts(history: History) -> str:
    """Nodes that were refused or lost; actors that moved for that, or that no other node had room for."""
    kinds = (NodeRefused, NodeLost, ActorMoved, ActorGivenUp)
    events = [logged.event for logged in history.events if isinstance(logged.event, kinds)]
    words = [text for event in events if (text := warning_of(event)) is not None]
    if not words:
        return ""
    lines = "".join(f"<li>{escape(text)}</li>" for text in words[:_HOSTS_SHOWN])
    hidden = len(words) - _HOSTS_SHOWN
    more = note(f"{hidden} later ones are in events.jsonl.") if hidden > 0 else ""
    return f"<h2>Hosts</h2><ul>{lines}</ul>{more}"


def _headline(history: History) -> str:
    if history.failure is not None:
        steps = count(len(history.steps), "step") if history.steps else "no step"
        return f"Failed after {steps}"
    if not history.steps:
        return "No training step has finished"
    steps = count(len(history.steps), "step")
    for name in evaluated_names(history.evaluations):
        if name.startswith(OF_REWARDS):
            continue
        evaluations = history.evaluated(name)
        if len(evaluations) >= 2:
            before, after = evaluations[0][1], evaluations[-1][1]
            form = ".1%" if "accuracy" in name else ".3f"
            return f"{name[0].upper()}{name[1:]} {change(before, after, form)} in {steps}"
    ends = mean_rewards(history)
    if ends is None:
        return f"{steps} finished"
    first, last = ends
    if len(history.steps) == 1:
        return f"Mean reward {first:.3f} after 1 step"
    return f"Mean reward {change(first, last, '.3f')} in {steps}"


def _ending(history: History) -> str:
    turns = history.events_of(RunStarted, RunResumed, RunEnded)
    if turns and isinstance(turns[-1], RunEnded):
        return ""
    return " · no end recorded: still running, or stopped"


def _facts(history: History) -> str:
    """The key figures. Shares are shares of the step time."""
    if not history.steps:
        return ""
    resumed = f"resumed at {format_numbers(history.resumes)}" if history.resumes else ""
    facts = [("Steps", str(len(history.steps)), resumed)]
    steps_s = f"from start to end; steps: {duration(history.step_seconds)}"
    facts.append(("Wall time", duration(history.wall_s), steps_s))
    tokens = history.total("tokens")
    if tokens and history.step_seconds:
        speed = f"{compact(tokens / history.step_seconds)} tokens/s"
        facts.append(("Throughput", speed, f"{compact(tokens)} tokens"))
    if history.step_seconds and history.of_step("overlap_s"):
        overlap = history.total("overlap_s")
        share = f"{overlap / history.step_seconds:.1%} of step time: rollout and training at once"
        facts.append(("Overlap", duration(overlap), share))
    failed = history.total("failed_trajectories")
    facts.append(("Failed trajectories", f"{failed:g}", "dropped, not trained on"))
    stale = history.total("stale_samples")
    oldest = max((age for _, age in history.of_step("max_staleness")), default=0)
    detail = f"by at most {count(int(oldest), 'version')}" if stale else "generated by an older version"
    facts.append(("Stale samples", f"{stale:g}", detail))
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(detail)}</small></dd></div>"
        for name, value, detail in [*facts, *_rare_facts(history)]
    )
    return f'<dl class="facts">{cells}</dl>'


def _rare_facts(history: History) -> list[tuple[str, str, str]]:
    """Counts that most runs don't have: those that are not zero."""
    counts = (
        ("Retried turns", "begun again, because their instance was lost", "retried_turns"),
        ("Resumed turns", "begun by one version, completed by a later one", "resumed_turns"),
        ("Oversampled trajectories", "started beyond a group's size, not used", "oversampled_trajectories"),
        ("Replaced trajectories", "in place of overdue ones", "replaced_trajectories"),
        ("Dropped groups", "zero advantage, or too few survivors", "dropped_groups"),
        ("Restarted groups", "begun again after the loss of a rollout worker", "restarted_groups"),
        ("Replaced queries", "in place of dropped groups", "replaced_queries"),
    )  # fmt: skip
    return [
        (name, f"{total:g}", detail) for name, detail, figure in counts if (total := history.total(figure))
    ]


# --------------------------------------------------------------------------- failures, events, configuration


def _failures(history: History) -> str:
    failed = int(history.total("failed_trajectories"))
    events = history.events_of(TrajectoryFailed)
    parts = []
    if failed or events:
        parts.append(f"<p>{max(failed, len(events))} failed and were dropped.</p>")
    elif history.steps:
        parts.append("<p>None.</p>")
    if events:
        first = events[0]
        parts.append(note(f"The first one: step: {first.step}, trajectory: {first.trajectory}"))
        parts.append(f"<pre>{escape(first.traceback or first.error)}</pre>")
    if history.unreadable:
        lines = count(history.unreadable, "line")
        parts.append(f'<p class="bad">{lines} of metrics.jsonl and events.jsonl could not be read.</p>')
    return f"<h2>Failed trajectories</h2>{''.join(parts)}" if parts else ""


def _events(history: History) -> str:
    shown = [logged for logged in history.events if not isinstance(logged.event, COPIES)]
    if not shown:
        return ""
    rows = []
    for logged in shown[:_EVENTS_SHOWN]:
        details = _details(logged.line)
        rows.append([clock(logged.line.get("time")), str(logged.line.get("event", "")), details])
    hidden = len(shown) - len(rows)
    more = note(f"{hidden} later ones are in events.jsonl.") if hidden > 0 else ""
    events = table(["time", "event", "details"], rows, css="words")
    return f"<details><summary>Events ({len(shown)})</summary>{events}{more}</details>"


def _details(event: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}: {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in event.items()
        if key not in ("time", "event", "traceback")
    )


def _config(history: History) -> str:
    if not history.config_text:
        return ""
    text = f"<pre>{escape(history.config_text)}</pre>"
    return f"<details><summary>Configuration, as resolved</summary>{text}</details>"
