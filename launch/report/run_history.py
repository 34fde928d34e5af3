"""What a run folder says: ``metrics.jsonl``, ``events.jsonl`` and ``config.yaml``, read with patience.

A run may be cut off in the middle of a line, resumed from an earlier step, or still going; every key may be
missing. What is read here is plain numbers; nothing in it is judged.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from ..formatting import number
from .charts import Point

Part = Literal[
    "rollout only", "rollout and training", "training only", "optimizer", "publishing weights", "other"
]
_STEP_LIMIT = 10**12  # what is beyond is no step, and no float holds it exactly
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class History:
    """One run. ``records`` ascend by step, one per step: steps repeated after a resume replace the lost ones.

    ``wall_s``: seconds spent from first to last step, the lost steps included, the pauses not.
    ``resumes``: the steps at which the run was picked up again.
    ``unreadable``: lines that were no JSON object.
    """

    name: str
    records: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    config_text: str = ""
    mode: str = ""
    wall_s: float = 0.0
    resumes: Sequence[int] = ()
    unreadable: int = 0
    _columns: dict[str, list[Point]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _keys(self) -> list[str]:
        return list(dict.fromkeys(key for record in self.records for key in record))

    @cached_property
    def agents(self) -> list[str]:
        """Names in the order of their first appearance."""
        return self.names("reward/")

    @cached_property
    def steps(self) -> int:
        """Training steps finished; a record that holds only an evaluation is none."""
        return sum(_is_training(record) for record in self.records)

    @cached_property
    def versions(self) -> dict[str, int]:
        """The last known version of every policy or agent."""
        last: dict[str, int] = {}
        for record in self.records:
            versions = record.get("versions")
            if isinstance(versions, dict):
                last.update((name, value) for name, value in versions.items() if isinstance(value, int))
        return last

    @cached_property
    def tokens(self) -> float:
        return self.total("tokens")

    @cached_property
    def step_seconds(self) -> float:
        return self.total("step_s")

    def names(self, *prefixes: str) -> list[str]:
        """What follows one of the prefixes in any key, in order of first appearance."""
        found = (key[len(prefix) :] for key in self._keys for prefix in prefixes if key.startswith(prefix))
        return list(dict.fromkeys(found))

    def has(self, key: str) -> bool:
        return bool(self.column(key))

    def column(self, key: str) -> list[Point]:
        """(step, value) wherever ``key`` holds a finite number."""
        if key not in self._columns:
            self._columns[key] = [
                (record["step"], value)
                for record in self.records
                if key in record and (value := number(record[key])) is not None
            ]
        return self._columns[key]

    def total(self, key: str) -> float:
        return math.fsum(value for _, value in self.column(key))

    def events_named(self, name: str) -> list[Mapping[str, Any]]:
        return [event for event in self.events if event.get("event") == name]

    def time_split(self) -> dict[Part, list[Point]]:
        """(step, seconds) of each part of a step; a step's parts add up to its ``step_s``."""
        agents = self.names("backward_s/", "optimizer_s/", "publish_s/")
        split: dict[Part, list[Point]] = {part: [] for part in PARTS}
        for record in self.records:
            if (step_s := number(record.get("step_s"))) is not None:
                for part, seconds in zip(PARTS, split_step(record, step_s, agents), strict=True):
                    split[part].append((record["step"], seconds))
        return split


def split_step(record: Mapping[str, Any], step_s: float, agents: Sequence[str]) -> tuple[float, ...]:
    """The wall time ``step_s`` of one step, cut into `PARTS` (seconds, each >= 0, summing to ``step_s``).

    Measured: ``rollout_s`` and the ``overlap_s`` in it. The time after the rollout is shared out by the
    agents' own clocks: backward seconds beyond the overlap, optimizer and publishing, summed over the agents
    and scaled down together where they exceed it because agents worked at the same time.
    """
    step_s = max(0.0, step_s)
    rollout = min(max(0.0, number(record.get("rollout_s")) or 0.0), step_s)
    both = min(max(0.0, number(record.get("overlap_s")) or 0.0), rollout)
    after = step_s - rollout

    def summed(key: str) -> float:
        return math.fsum(max(0.0, number(record.get(f"{key}/{agent}")) or 0.0) for agent in agents)

    wanted = (max(0.0, summed("backward_s") - both), summed("optimizer_s"), summed("publish_s"))
    scale = min(1.0, after / total) if (total := math.fsum(wanted)) else 0.0
    training, optimizer, publishing = (seconds * scale for seconds in wanted)
    other = max(0.0, after - training - optimizer - publishing)
    return rollout - both, both, training, optimizer, publishing, other


def first_and_last(points: Sequence[Point], share: float = 0.05) -> tuple[float, float] | None:
    """The means over the first and the last ``share`` of the points, one at least; None without points."""
    if not points:
        return None
    count = max(1, math.ceil(share * len(points)))
    first, last = points[:count], points[-count:]
    return sum(y for _, y in first) / count, sum(y for _, y in last) / count


# --------------------------------------------------------------------------- reading


def load_history(run_dir: Path) -> History:
    """Read a run folder. Missing files count as empty; raises `NotADirectoryError` without the folder."""
    if not run_dir.is_dir():
        raise NotADirectoryError(f"{run_dir} is not a run folder")
    lines, bad_lines = _read_lines(run_dir / "metrics.jsonl")
    events, bad_events = _read_lines(run_dir / "events.jsonl")
    lines = [*_evaluations(events), *lines]
    steps = [line for line in lines if type(line.get("step")) is int and 0 <= line["step"] < _STEP_LIMIT]
    records, resumes, wall_s = _joined(steps)
    config_text = _read_text(run_dir / "config.yaml")
    return History(
        name=run_dir.resolve().name,
        records=records,
        events=events,
        config_text=config_text,
        mode=_mode(config_text),
        wall_s=wall_s,
        resumes=resumes,
        unreadable=bad_lines + bad_events,
    )


def _joined(lines: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[int], float]:
    """Records by ascending step, steps resumed at, wall time in seconds; from lines in the order written."""
    by_step: dict[int, Mapping[str, Any]] = {}
    resumes: list[int] = []
    wall_s, began, now, last = 0.0, None, 0.0, None
    for line in lines:
        step = line["step"]
        if _is_training(line):
            rewound = last is not None and step <= last
            if rewound:  # everything from this step on was lost with the process that did it
                resumes.append(step)
                by_step = {kept: record for kept, record in by_step.items() if kept < step}
            last = step
            time_s, step_s = number(line.get("time_s")), number(line.get("step_s")) or 0.0
            if time_s is None:
                time_s = now + step_s
            if began is None or rewound or time_s < now:  # a new process, with a clock of its own
                if began is not None and not rewound:
                    resumes.append(step)
                wall_s += now - began if began is not None else 0.0
                began = max(0.0, time_s - step_s)
            now = time_s
        by_step[step] = {**by_step[step], **line} if step in by_step else line
    wall_s += now - began if began is not None else 0.0
    return [by_step[step] for step in sorted(by_step)], resumes, wall_s


def _evaluations(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """From their events: the one before training, and one that a resumed run made up for, are on no step's line."""
    return [
        {"step": event["step"], **{f"eval/{name}": value for name, value in event.items()}}
        for event in events
        if event.get("event") == "evaluated" and "step" in event
    ]


def _is_training(record: Mapping[str, Any]) -> bool:
    return "step_s" in record or any(key.startswith("reward/") for key in record)


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects of a file of lines, and how many lines were none."""
    good, bad = [], 0
    for line in _read_text(path).splitlines():
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            item = None
        if isinstance(item, dict):
            good.append(item)
        else:
            bad += 1
    return good, bad


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _mode(config_text: str) -> str:
    """The run's mode; empty where the config doesn't say or can't be read."""
    try:
        config = yaml.safe_load(config_text)
    except yaml.YAMLError:
        return ""
    mode = config.get("mode") if isinstance(config, dict) else None
    return mode if isinstance(mode, str) else ""
