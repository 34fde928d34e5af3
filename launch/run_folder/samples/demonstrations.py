"""The demonstrations that the successful trajectories of a run are, as ``rollout.demonstrations`` reads them."""

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ....actors.chat.answer import without_reasoning
from ....actors.demonstrations.demonstration import demonstration_line
from ....actors.recorded_trajectory import RecordedTrajectory
from ....core.base.texts import half_problem
from ....core.durable.files import draft_of
from ...config.config_reading import read_yaml
from ...errors import NoDemonstration
from ..run_directory import RunDirectory
from .conditions import FigureCondition
from .reader import Samples

_FOLLOWED: Final = {"followed"}
"""The metrics of a trajectory along a demonstration."""
_TREE: Final = "a tree, which has several turns of a prompt"
_PATCHED: Final = "along a demonstration already, with actions of another origin"
_EMPTY: Final = "with an answer that is empty"
_HALVES: Final = "with text that UTF-8 lacks"


@dataclass(frozen=True, slots=True)
class Written:
    """``queries``: with a demonstration. ``successes``: trajectories that fit. ``trajectories``: all. ``left_out``:
    numbers of them that can't be demonstrations, by the reason."""

    queries: int
    successes: int
    trajectories: int
    left_out: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Best:
    """The best trajectory of a query: by its reward, then by as few turns as possible."""

    rank: tuple[float, int]
    line: str


def write_demonstrations(samples: Samples, file: Path, success: FigureCondition, **filters: Any) -> Written:
    """Writes the best successful trajectory of each query to ``file``, which takes its place when all of it is there:
    the highest reward, of these the fewest turns, of these the newest. Queries are in the order of their texts.
    ``filters``: of ``Samples``. Memory: of one trajectory for each query.

    Raises NoDemonstration if there is none, SamplesUnreadable, InvalidCondition, OSError.
    """
    rollout = read_yaml(RunDirectory(samples.path.parent).config).get("rollout")
    played = {key for key in ("tree", "demonstrations") if isinstance(rollout, dict) and rollout.get(key)}
    best: dict[str, _Best] = {}
    left_out: Counter[str] = Counter()
    values: list[float] = []
    successes = trajectories = 0
    with closing(samples.iterate(**(filters | {"failed": False}))) as recorded:
        for trajectory in recorded:
            trajectories += 1
            if reason := _reason_against(trajectory, played):
                left_out[reason] += 1
                continue
            value = trajectory.reward if success.name == "reward" else trajectory.metrics.get(success.name)
            if value is None:
                continue
            values.append(value)
            if success.condition.holds(value):
                successes += 1
                _keep(best, trajectory)
    if not best:
        raise NoDemonstration(_explain(samples, success, trajectories, values, left_out))
    with draft_of(file) as draft:
        draft.write_text("".join(f"{best[text].line}\n" for text in sorted(best)), encoding="ascii")
    return Written(len(best), successes, trajectories, left_out)


def left_out_note(left_out: Mapping[str, int]) -> str:
    """The trajectories that can't be demonstrations, in words, behind a semicolon; empty without any."""
    return "".join(f"; left out: {count} {reason}" for reason, count in left_out.items())


def _keep(best: dict[str, _Best], trajectory: RecordedTrajectory) -> None:
    reward = float("-inf") if trajectory.reward is None else trajectory.reward
    rank = (reward, -len(trajectory.turns))
    text = trajectory.query.text
    if text in best and best[text].rank > rank:
        return
    actions: dict[str, list[str]] = {}
    for turn in trajectory.turns:
        actions.setdefault(turn.agent, []).append(without_reasoning(turn.text))
    best[text] = _Best(rank, demonstration_line(text, actions))


def _reason_against(trajectory: RecordedTrajectory, played: set[str]) -> str:
    """The reason for which a trajectory can't be a demonstration; empty if it can."""
    if "tree" in played and not trajectory.evaluation:
        return _TREE
    if "demonstrations" in played and not trajectory.evaluation and trajectory.metrics.keys() == _FOLLOWED:
        return _PATCHED
    texts = [without_reasoning(turn.text) for turn in trajectory.turns]
    if not texts or not all(texts):
        return _EMPTY
    return _HALVES if half_problem([trajectory.query.text, *texts]) else ""


def _explain(
    samples: Samples,
    success: FigureCondition,
    trajectories: int,
    values: list[float],
    left_out: Mapping[str, int],
) -> str:
    note = left_out_note(left_out)
    if not trajectories:
        return f"{samples.path} has no trajectory that fits the filters, apart from those that failed"
    if sum(left_out.values()) == trajectories:
        return f"none of {trajectories} trajectories of {samples.path} can be a demonstration{note}"
    if not values:
        return (
            f"no trajectory of {samples.path} has the figure {success.name}: --success takes 'reward', or a metric of "
            f"the workflow, as 'accuracy>=1'{note}"
        )
    return (
        f"none of {trajectories} trajectories of {samples.path} has {success}: their {success.name} is "
        f"{min(values):g} to {max(values):g}; choose another --success{note}"
    )
