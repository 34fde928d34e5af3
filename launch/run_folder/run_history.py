"""Reads the history of a run from its folder: ``metrics.jsonl`` and ``events.jsonl``.

Each file may be missing. A run may have been cut off in the middle of a line, resumed from an earlier step, or still be
running.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from ...actors.figures import FIGURES, UnknownFigure
from ...actors.names import AgentName, PolicyName
from ...actors.run_events import Evaluated, RunEnded, RunResumed, RunStarted
from ...actors.step_metrics import SUBJECT_OF, StepMetrics
from ..monitoring.formatting import number
from .json_lines import metrics_from_json, read_lines
from .logged_event import LoggedEvent

Event = TypeVar("Event")

Point = tuple[float, float]
"""A step and a value."""


@dataclass(frozen=True)
class History:
    """One run. ``steps`` ascend, each is there once: steps repeated after a resume replace the lost ones.

    ``evaluations``: metrics by name, by step; step 0 is before training. ``wall_s``: seconds from the start to the end,
    with lost steps and without the pauses before resumes: the sum of those that the console shows. ``resumes``: the
    first steps after each resume.
    """

    name: str
    steps: Sequence[StepMetrics] = ()
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    events: Sequence[LoggedEvent] = ()
    wall_s: float = 0.0
    resumes: Sequence[int] = ()

    @cached_property
    def agents(self) -> list[AgentName]:
        """Agents with a reward, in order of first appearance."""
        return list(
            dict.fromkeys(
                name for step in self.steps for name, figures in step.by_agent.items() if "reward" in figures
            )
        )

    def _points(self, read: Callable[[StepMetrics], float | None]) -> list[Point]:
        """(step, value) for all steps with a value."""
        return [(step.step, value) for step in self.steps if (value := read(step)) is not None]

    def of_agent(self, name: AgentName, figure: str) -> list[Point]:
        """(step, value) of an agent's figure, for the steps that have it. Raises UnknownFigure."""
        return self._of_part("by_agent", name, figure)

    def of_policy(self, name: PolicyName, figure: str) -> list[Point]:
        """(step, value) of a policy's figure, for the steps that have it. Raises UnknownFigure."""
        return self._of_part("by_policy", name, figure)

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

    def total(self, figure: str) -> float:
        """The sum over the steps. Raises UnknownFigure."""
        return math.fsum(value for _, value in self.of_step(figure))

    def of_step(self, figure: str) -> list[Point]:
        """(step, value) of a figure of steps. Raises UnknownFigure."""
        if figure not in FIGURES["step"]:
            raise UnknownFigure("step", figure)
        return self._points(lambda step: step.figures.get(figure, getattr(step, figure, None)))

    def events_of(self, *kinds: type[Event]) -> list[Event]:
        """The events of these classes, in the order of the file."""
        return [logged.event for logged in self.events if isinstance(logged.event, kinds)]


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
    lines, _ = read_lines(run_dir / "metrics.jsonl")
    event_lines, _ = read_lines(run_dir / "events.jsonl")
    events = [LoggedEvent.of(line) for line in event_lines]
    joined = _Joined()
    for line in lines:
        if (step := metrics_from_json(line)) is not None:
            joined.add(step)
    return History(
        name=run_dir.resolve().name,
        steps=joined.steps,
        evaluations=_evaluations(events, joined.steps),
        events=events,
        wall_s=max(_wall_s(events), joined.wall_s),
        resumes=joined.resumes,
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
