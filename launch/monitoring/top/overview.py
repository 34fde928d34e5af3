"""The content of ``flexmarl top``: tables and lines of one run, made of the views of the page's panels. Pure.

All texts are harmless for a terminal, on one line, and short: a model or a recipe may have made them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ..console.progress_state import one_line
from ..console.progress_views import pace
from ..formatting import clock, duration
from ..page import now_panel, policies_panel
from ..page.recorded_run import RecordedRun
from ..slowness.finding import Finding
from ..slowness.words import finding_words

_LONGEST: Final = 400
_MOST_WARNINGS: Final = 12
_MOST_ROWS: Final = 200
_NONE: Final = "-"
_POOL_PARTS: Final = ("computing", "idle", "swapping", "waiting", "suspended")


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of cells below ``columns``, then lines. An empty one is left out of the screen."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    lines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Overview:
    """``has_ended``: no process works on the run."""

    has_ended: bool
    sections: Sequence[Section]


class Views(NamedTuple):
    """The views of two panels, as of a ``revision`` of the run."""

    revision: int
    now: Mapping[str, Any]
    policies: Mapping[str, Any]


def views_of(run: RecordedRun) -> Views:
    """To be called under ``run.reading``."""
    return Views(run.revision, now_panel.view(run, {}), policies_panel.view(run, {}))


def overview(run: RecordedRun, views: Views) -> Overview:
    """The run as it is now; to be called under ``run.reading``, with ``views`` of its present revision."""
    _, now, policies = views
    live = run.live if run.live is not None and run.state == "running" else {}
    findings = [finding_words(Finding(**fields)) for fields in now["findings"]]
    warnings = [f"{clock(news['time'])}  {news['text']}".strip() for news in now["news"] if news["warning"]]
    return Overview(
        run.state != "running",
        [
            Section("", lines=_shorten_all(_head(run, now, live))),
            _agents(run, policies, live),
            _instances(policies, live),
            _pool(policies),
            Section(f"{run.name} stands still and waits for", lines=_shorten_all(live.get("causes", ()))),
            Section("Waits and computations now", lines=_shorten_all(live.get("waits", ()))),
            Section("Time and learning of the newest steps", lines=_shorten_all(findings)),
            Section("Warnings, the newest first", lines=_shorten_all(warnings[:_MOST_WARNINGS])),
        ],
    )


def shorten(text: object) -> str:
    """``text`` on one line, with its control characters shown, and its end left out if it is long."""
    words = str(text)
    line = one_line(words[: 4 * _LONGEST])
    return line if len(line) <= _LONGEST and len(words) <= 4 * _LONGEST else f"{line[:_LONGEST]} …"


def _shorten_all(lines: Sequence[object]) -> list[str]:
    return [shorten(line) for line in lines]


# --------------------------------------------------------------------------- head


def _head(run: RecordedRun, now: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    steps = f"step {now['step']}" + (f"/{now['steps']}" if now["steps"] else "")
    parts = [run.name, now["mode"], steps]
    if (pace_s := now["pace_s"]) is not None:
        parts.append(pace(pace_s))
        if run.state == "running" and now["steps"]:
            parts.append(f"{duration(round(max(0, now['steps'] - now['step']) * pace_s))} left")
    return [" · ".join(part for part in parts if part), *_state(run, now, live), now["headline"]]


def _state(run: RecordedRun, now: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    if run.state == "not started":
        return ["No process has worked on this run yet."]
    if run.state != "running":
        failure = now["failure"]
        words = [f"This run has ended: {run.state}. Nothing changes any more."]
        return (
            words
            if failure is None
            else [*words, failure["error"], f"{failure['next_words']} {failure['next']}"]
        )
    if not live:
        return ["Running. Its process has not answered yet; the files of its folder are shown."]
    return [f"Running for {duration(live['since_s'])}, now: {live['phase'] or 'training'}"]


# --------------------------------------------------------------------------- tables


def _agents(run: RecordedRun, policies: Mapping[str, Any], live: Mapping[str, Any]) -> Section:
    places = _places(policies)
    is_shared = any(policy["seconds"] for policy in policies["policies"])
    instances = live.get("instances", {})
    rows = []
    for policy, agents in policies_panel.agents_of_policies(run).items():
        waiting = live.get("waiting", {}).get(policy)
        rows += [
            (
                agent,
                _newest(run, f"version/{policy}", "d"),
                _newest(run, f"reward/{agent}", ".3f"),
                _NONE if waiting is None else str(waiting),
                next((str(count) for name, count in instances.items() if policy in name.split(", ")), _NONE),
                _trainer(run, policy, places.get(policy, ()), is_shared=is_shared),
                _mean_wait(run, agent),
                policy,
            )
            for agent in agents
        ]
    columns = ("agent", "version", "reward", "queue", "instances", "trainer", "wait", "policy")
    return _table("Agents", columns, rows)


def _instances(policies: Mapping[str, Any], live: Mapping[str, Any]) -> Section:
    running = live.get("running", {})
    newest_changes = {row["name"]: row for row in policies["instances"]}
    rows = [
        (
            name,
            newest_changes[name]["policy"] if name in newest_changes else _NONE,
            newest_changes[name]["state"] if name in newest_changes else "ready",
            str(running[name]) if name in running else _NONE,
            newest_changes[name]["reason"] if name in newest_changes else "",
        )
        for name in dict.fromkeys([*running, *newest_changes])
    ]
    return _table("Instances", ("instance", "policy", "state", "turns now", "reason"), rows)


def _pool(policies: Mapping[str, Any]) -> Section:
    """The present stay on each slot of a shared pool."""
    stays = policies["stays"]
    rows = [
        (stays["slots"][slot], stays["policies"][policy], clock(begin), reason)
        for slot, policy, begin, end, reason in stays["stays"]
        if end is None
    ]
    return _table("Slots of the shared pool", ("slot", "policy", "since", "reason"), sorted(rows))


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Section:
    more = len(rows) - _MOST_ROWS
    return Section(
        title,
        columns,
        [tuple(map(shorten, row)) for row in rows[:_MOST_ROWS]],
        [f"and {more} more"] if more > 0 else (),
    )


def _places(policies: Mapping[str, Any]) -> dict[str, list[str]]:
    """The slots that each policy has now."""
    stays = policies["stays"]
    places: dict[str, list[str]] = {}
    for slot, policy, _, end, _ in stays["stays"]:
        if end is None:
            places.setdefault(stays["policies"][policy], []).append(stays["slots"][slot])
    return places


def _trainer(run: RecordedRun, policy: str, slots: Sequence[str], *, is_shared: bool) -> str:
    """Its slots, and the share of the newest step in which it computed."""
    if is_shared:
        seconds = {part: _value(run, f"pool_{part}_s/{policy}") or 0.0 for part in _POOL_PARTS}
        place = f"on {', '.join(slots)}" if slots else "suspended"
        whole = sum(seconds.values())
        return f"{place}, computing {seconds['computing'] / whole:.0%}" if whole else place
    parts = [_value(run, f"{part}_s/{policy}") for part in ("backward", "optimizer", "publish")]
    step_s = _value(run, "step_s")
    if not step_s or all(part is None for part in parts):
        return _NONE
    return f"busy {min(1.0, sum(part or 0.0 for part in parts) / step_s):.0%}"


def _mean_wait(run: RecordedRun, agent: str) -> str:
    """Seconds that a turn of the newest step waited for room."""
    queue_s, turns = _value(run, f"queue_s/{agent}"), _value(run, f"turns/{agent}")
    return _NONE if queue_s is None or not turns else duration(queue_s / turns)


def _newest(run: RecordedRun, key: str, form: str) -> str:
    value = _value(run, key)
    return _NONE if value is None else format(int(value) if form == "d" else value, form)


def _value(run: RecordedRun, key: str) -> float | None:
    return run.curves[key].values[-1] if key in run.curves else None
