"""Reads a run folder: ``metrics.jsonl``, ``events.jsonl`` and ``config.yaml``.

Each file may be missing. A run may have been cut off in the middle of a line, resumed from an earlier step, or still be
running.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml

from ....actors.figures import FIGURES, UnknownFigure
from ....actors.names import AgentName, PolicyName
from ....actors.run_events import Evaluated, RunEnded, RunEvent, RunResumed, RunStarted
from ....actors.step_metrics import SUBJECT_OF, StepMetrics
from ...run_folder.json_lines import event_from_json, metrics_from_json, other_figures, read_lines
from ..formatting import number
from .charts import Point

Part = Literal[
    "rollout only", "rollout and training", "training only", "optimizer", "publishing weights", "other"
]
PARTS: tuple[Part, ...] = get_args(Part)

Event = TypeVar("Event")


@dataclass(frozen=True)
class LoggedEvent:
    """A line of ``events.jsonl``. ``event``: None if the line has an unknown name or lacks a field."""

    line: Mapping[str, Any]
    event: RunEvent | None


@dataclass(frozen=True)
class History:
    """One run. ``steps`` ascend, each is there once: steps repeated after a resume replace the lost ones.

    ``evaluations``: metrics by name, by step; step 0 is before training. ``unknown_figures``: of steps, beyond those of
    ``StepMetrics``, such as a workflow's own metrics, by step and key. ``samplings``: the further ones of the
    evaluations, by name. ``wall_s``: seconds from the start to the end,
    with lost steps and without the pauses before resumes: the sum of those that the console shows. ``resumes``: the
    first steps after each resume. ``policies``: by agent, as far as the config says. ``held_out``: the config declares
    that of the evaluations. ``unreadable``: the number of unreadable lines.
    """

    name: str
    steps: Sequence[StepMetrics] = ()
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    unknown_figures: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    samplings: Sequence[str] = ()
    events: Sequence[LoggedEvent] = ()
    config_text: str = ""
    mode: str = ""
    policy_of: Mapping[str, str] = field(default_factory=dict)
    wall_s: float = 0.0
    held_out: bool = False
    resumes: Sequence[int] = ()
    unreadable: int = 0

    @cached_property
    def agents(self) -> list[AgentName]:
        """Agents with a reward, in order of first appearance."""
        return list(
            dict.fromkeys(
                name for step in self.steps for name, figures in step.by_agent.items() if "reward" in figures
            )
        )

    @cached_property
    def policies(self) -> list[PolicyName]:
        """All policies with a version, in order of first appearance."""
        return list(dict.fromkeys(name for step in self.steps for name in step.versions))

    @cached_property
    def processes(self) -> list[str]:
        """The processes with figures, in order of first appearance."""
        return list(dict.fromkeys(name for step in self.steps for name in step.by_process))

    @cached_property
    def devices(self) -> list[str]:
        """The UUIDs of the machine's GPUs."""
        return list(dict.fromkeys(uuid for step in self.steps for uuid in step.by_device))

    @cached_property
    def versions(self) -> dict[PolicyName, int]:
        """The last known version of every policy."""
        return {name: version for step in self.steps for name, version in step.versions.items()}

    def _points(self, read: Callable[[StepMetrics], float | None]) -> list[Point]:
        """(step, value) for all steps with a value."""
        return [(step.step, value) for step in self.steps if (value := read(step)) is not None]

    def of_agent(self, name: AgentName, figure: str, share_of: str = "") -> list[Point]:
        """``share_of``: the figure that the value is divided by."""
        points = self._of_part("by_agent", name, figure)
        if not share_of:
            return points
        wholes = dict(self._of_part("by_agent", name, share_of))
        return [(step, value / whole) for step, value in points if (whole := wholes.get(step))]

    def of_policy(self, name: PolicyName, figure: str) -> list[Point]:
        """(step, value) of a policy's figure, for the steps that have it. Raises UnknownFigure."""
        return self._of_part("by_policy", name, figure)

    def of_process(self, name: str, figure: str) -> list[Point]:
        """(step, value) of a process's figure. Raises UnknownFigure."""
        return self._of_part("by_process", name, figure)

    def of_device(self, uuid: str, figure: str) -> list[Point]:
        """(step, value) of a GPU's figure. Raises UnknownFigure."""
        return self._of_part("by_device", uuid, figure)

    def _of_part(self, part: str, name: str, figure: str) -> list[Point]:
        """Raises UnknownFigure."""
        if figure not in FIGURES[SUBJECT_OF[part]]:
            raise UnknownFigure(SUBJECT_OF[part], figure)
        return self._points(lambda step: getattr(step, part).get(name, {}).get(figure))

    def evaluated(self, metric: str) -> list[Point]:
        """(step, value) of all evaluations with that metric."""
        return [
            (step, metrics[metric]) for step, metrics in sorted(self.evaluations.items()) if metric in metrics
        ]

    def of_others(self) -> dict[str, list[Point]]:
        """(step, value) of all keys in ``unknown_figures``, in order of first appearance."""
        curves: dict[str, list[Point]] = {}
        for step, figures in sorted(self.unknown_figures.items()):
            for key, value in figures.items():
                curves.setdefault(key, []).append((step, value))
        return curves

    @property
    def failure(self) -> RunEnded | None:
        """The end of the run's last life, if that was an error."""
        lives = self.events_of(RunStarted, RunResumed, RunEnded)
        last = lives[-1] if lives else None
        return last if isinstance(last, RunEnded) and last.error and not last.stopped else None

    def total(self, figure: str) -> float:
        """The sum over the steps. Raises UnknownFigure."""
        return math.fsum(value for _, value in self.of_step(figure))

    def of_step(self, figure: str) -> list[Point]:
        """(step, value) of a figure of steps. Raises UnknownFigure."""
        if figure not in FIGURES["step"]:
            raise UnknownFigure("step", figure)
        return self._points(lambda step: step.figures.get(figure, getattr(step, figure, None)))

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of all steps together."""
        return self.total("step_s")

    def events_of(self, *kinds: type[Event]) -> list[Event]:
        """The events of these classes, in the order of the file."""
        return [logged.event for logged in self.events if isinstance(logged.event, kinds)]

    def time_split(self) -> dict[Part, list[Point]]:
        """(step, seconds) of each part of a step; a step's parts add up to its ``step_s``."""
        split: dict[Part, list[Point]] = {part: [] for part in PARTS}
        for step in self.steps:
            for part, seconds in zip(PARTS, split_step(step), strict=True):
                split[part].append((step.step, seconds))
        return split


def split_step(step: StepMetrics) -> tuple[float, ...]:
    """The wall time ``step_s`` of one step, cut into ``PARTS`` (seconds, each >= 0, summing to ``step_s``).

    Measured: ``rollout_s`` and ``overlap_s`` within it. The time after the rollout is divided by the policies' own
    times: backward seconds beyond the overlap, optimizer and publishing, summed over the policies. They are scaled down
    together if they exceed the time, because policies worked in parallel.
    """
    step_s = max(0.0, step.step_s)
    rollout = min(max(0.0, step.rollout_s), step_s)
    both = min(max(0.0, step.overlap_s or 0.0), rollout)
    after = step_s - rollout

    def total_of(figure: str) -> float:
        return math.fsum(max(0.0, figures.get(figure, 0.0)) for figures in step.by_policy.values())

    backward = total_of("backward_s")
    durations = (
        max(0.0, backward - both),
        total_of("optimizer_s"),
        total_of("publish_s"),
    )
    total = math.fsum(durations)
    scale = min(1.0, after / total) if total else 0.0
    training, optimizer, publishing = (seconds * scale for seconds in durations)
    other = max(0.0, after - total)
    return rollout - both, both, training, optimizer, publishing, other


def first_and_last(points: Sequence[Point], share: float = 0.05) -> tuple[float, float] | None:
    """The means over the first and the last ``share`` of the points, at least one point; None without points."""
    if not points:
        return None
    count = max(1, math.ceil(share * len(points)))
    first, last = points[:count], points[-count:]
    return sum(y for _, y in first) / count, sum(y for _, y in last) / count


# --------------------------------------------------------------------------- reading


def load_history(run_dir: Path) -> History:
    """Reads a run folder. Missing files count as empty; raises NotADirectoryError without the folder."""
    if not run_dir.is_dir():
        raise NotADirectoryError(f"{run_dir} is not a run folder")
    lines, bad_lines = read_lines(run_dir / "metrics.jsonl")
    event_lines, bad_events = read_lines(run_dir / "events.jsonl")
    written = [step for line in lines if (step := metrics_from_json(line)) is not None]
    events = [LoggedEvent(line, event_from_json(line)) for line in event_lines]
    config_text = _read_text(run_dir / "config.yaml")
    config = _config(config_text)
    mode = config.get("mode")
    unknown_figures = {line["step"]: other_figures(line) for line in lines if type(line.get("step")) is int}
    joined = _Joined()
    for step in written:
        joined.add(step)
    return History(
        name=run_dir.resolve().name,
        steps=joined.steps,
        evaluations=_evaluations(events, joined.steps),
        unknown_figures={
            step.step: figures for step in joined.steps if (figures := unknown_figures.get(step.step))
        },
        samplings=_samplings(config),
        events=events,
        config_text=config_text,
        mode=mode if isinstance(mode, str) else "",
        policy_of=_policy_of(config),
        wall_s=max(_wall_s(events), joined.wall_s),
        held_out=_held_out(config),
        resumes=joined.resumes,
        unreadable=bad_lines + bad_events + len(lines) - len(written),
    )


class _Joined:
    """Joins the steps of all processes that worked on a run, in the order written.

    A step that was already there shows a resume: it and all later steps were lost with the process that wrote them. A
    clock that starts again shows a resume too: the lost steps may have been removed from the file before.
    """

    def __init__(self) -> None:
        self._by_step: dict[int, StepMetrics] = {}
        self._last: StepMetrics | None = None
        self._began_s = 0.0
        self._earlier_s = 0.0
        self.resumes: list[int] = []

    def add(self, step: StepMetrics) -> None:
        last = self._last
        if last is None:
            self._began_s = max(0.0, step.time_s - step.step_s)
        elif step.step <= last.step or step.time_s < last.time_s:
            self.resumes.append(step.step)
            self._by_step = {
                number: kept_step for number, kept_step in self._by_step.items() if number < step.step
            }
            self._earlier_s += last.time_s - self._began_s
            self._began_s = max(0.0, step.time_s - step.step_s)
        self._by_step[step.step] = self._last = step

    @property
    def steps(self) -> list[StepMetrics]:
        return [self._by_step[number] for number in sorted(self._by_step)]

    @property
    def wall_s(self) -> float:
        return self._earlier_s + (self._last.time_s - self._began_s if self._last else 0.0)


def _wall_s(events: Sequence[LoggedEvent]) -> float:
    """Seconds of all processes that worked on the run. One that was killed, or still runs, counts up to its last
    event."""
    finished_s, began, last = 0.0, None, None
    for logged in events:
        now = number(logged.line.get("time"))
        if isinstance(logged.event, RunStarted | RunResumed):
            finished_s += _between(began, last)
            began = now
        last = now
        if isinstance(logged.event, RunEnded):
            measured = logged.event.wall_s
            finished_s += _between(began, now) if measured is None else measured
            began = None
    return finished_s + _between(began, last)


def _between(began: float | None, ended: float | None) -> float:
    return 0.0 if began is None or ended is None else max(0.0, ended - began)


def _evaluations(
    events: Sequence[LoggedEvent], steps: Sequence[StepMetrics]
) -> dict[int, Mapping[str, float]]:
    """By step. An evaluation before training, or one that a resumed run caught up on, is in no step's metrics; those of
    steps that a resume lost are left out."""
    by_step: dict[int, Mapping[str, float]] = {}
    for logged in events:
        match logged.event:
            case RunStarted():
                by_step = {}
            case RunResumed(step=resumed):
                by_step = {step: metrics for step, metrics in by_step.items() if step <= resumed}
            case Evaluated():
                by_step[logged.event.step] = logged.event.metrics
    return {**by_step, **{step.step: step.evaluation for step in steps if step.evaluation}}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _config(text: str) -> Mapping[str, Any]:
    """The run's configuration; empty if it can't be read."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return config if isinstance(config, dict) else {}


def _policy_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The policy that each agent names; an agent that names none has one of its own name."""
    agents = config.get("agents")
    if not isinstance(agents, dict):
        return {}
    return {
        str(name): str(agent.get("policy") or name)
        for name, agent in agents.items()
        if isinstance(agent, dict)
    }


def _samplings(config: Mapping[str, Any]) -> list[str]:
    evaluation = config.get("evaluation")
    samplings = evaluation.get("samplings") if isinstance(evaluation, dict) else None
    return list(map(str, samplings)) if isinstance(samplings, dict) else []


def _held_out(config: Mapping[str, Any]) -> bool:
    evaluation = config.get("evaluation")
    return isinstance(evaluation, dict) and evaluation.get("held_out") is True
