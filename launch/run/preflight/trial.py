"""Plays trajectories before the start: the recipe's workflow in a rollout worker, whose engines give random answers.

    Trajectory ──> Rollout.run_trajectory ──> RouterActor ──> Instance (simulated) ──> ... ──> TrajectoryEnd

A workflow may hang, end its process or write files. So it is played at the end of the process of the checks, in a
temporary folder, and the program that asked waits no longer than the trial's deadline.
"""

import asyncio
import contextlib
import gc
import itertools
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ....actors.errors import RecipeError
from ....actors.messages import Query, VersionRange
from ....actors.names import PolicyName, Step, Version
from ....actors.recipe.recipe import Recipe
from ....actors.recipe.recipe_lines import line_of_error
from ....actors.rollout.groups.group_run import TrajectoryEnd
from ....actors.rollout.rollout import Rollout
from ....actors.rollout.trajectory import Trajectory
from ....core.system import ActorSystem
from ....core.wire.memory import MemoryNetwork
from ....transport.state import StateTransport
from ...config.run_config import RunConfig
from .trial_findings import (
    LongPrompts,
    Trial,
    has_long_prompt,
    judge_ends,
    judge_long_prompts,
    recipe_error_problem,
    unawaited_warnings,
)
from .trial_words import EMPTY_FOLDER, broken_trial_warning, overrun_warning
from .trial_worker import trial_worker

_TRIES: Final = 4
"""Trajectories that are played until one does not fail."""
_FRAMES: Final = 8


def play_trial(
    config: RunConfig,
    recipe: Recipe,
    training: Sequence[Query],
    evaluation: Sequence[Query],
    directory: Path,
) -> Trial:
    """``training``, ``evaluation``: the queries that are played. ``directory``: a private one, for the trial's own
    files; a folder in it is the working directory of the recipe's code meanwhile."""
    trial = Trial()
    limit_s = config.checks.trajectory_timeout_s
    with _unawaited_coroutines() as messages:
        try:
            asyncio.run(_play_all(config, recipe, training, evaluation, directory, trial))
        except TimeoutError:
            trial.warnings.append(overrun_warning(limit_s, None))
        except SystemExit as end:
            place = line_of_error(recipe.folder, end) or recipe.file.name
            trial.warnings.append(broken_trial_warning(f"{place}: its process ends (SystemExit: {end})"))
        except Exception as error:  # noqa: BLE001  # of the trial's own parts: it says nothing about the recipe
            trial.warnings.append(broken_trial_warning(f"{type(error).__name__}: {error}"))
    if not trial.problems:
        trial.warnings += unawaited_warnings(recipe.folder, messages)
    trial.warnings = [*dict.fromkeys(trial.warnings)]
    return trial


async def _play_all(
    config: RunConfig,
    recipe: Recipe,
    training: Sequence[Query],
    evaluation: Sequence[Query],
    directory: Path,
    trial: Trial,
) -> None:
    wire = MemoryNetwork(keep_log=False).wire("trial")
    async with ActorSystem("trial", directory, wire=wire) as system, StateTransport(directory) as transport:
        worker = await trial_worker(config, recipe, system, transport)
        with _working_directory(directory / "work"):
            async with asyncio.timeout(config.checks.trajectory_timeout_s):
                await _play_with(config, recipe, system, worker, training, evaluation, trial)


async def _play_with(
    config: RunConfig,
    recipe: Recipe,
    system: ActorSystem,
    worker: Rollout,
    training: Sequence[Query],
    evaluation: Sequence[Query],
    trial: Trial,
) -> None:
    try:
        await system.add(worker, "rollout-0")
    except RecipeError as error:
        hint = f"; {EMPTY_FOLDER}" if isinstance(error.__cause__, OSError) else ""
        trial.warnings.append(broken_trial_warning(f"{_first_line(error)}{hint}"))
        return
    try:
        await _play_queries(config, recipe, worker, training, evaluation, trial)
    except RecipeError as error:
        trial.problems.append(recipe_error_problem(recipe, error))
    try:
        await system.remove("rollout-0")
    except RecipeError as error:
        trial.warnings.append(_first_line(error))


def _first_line(error: RecipeError) -> str:
    return str(error).partition("\n")[0]


async def _play_queries(
    config: RunConfig,
    recipe: Recipe,
    worker: Rollout,
    training: Sequence[Query],
    evaluation: Sequence[Query],
    trial: Trial,
) -> None:
    """Raises RecipeError, which would end the run too."""
    if config.training.steps and training:
        ends = await _play(config, recipe, worker, training, Step(1), trial)
        if trial.problems or (ends and ends[-1].trajectory.has_overrun):
            return
    if evaluation:
        await _play(config, recipe, worker, evaluation, None, trial)


async def _play(
    config: RunConfig,
    recipe: Recipe,
    worker: Rollout,
    queries: Sequence[Query],
    step: Step | None,
    trial: Trial,
) -> list[TrajectoryEnd]:
    """Plays trajectories until one does not fail, and returns their ends; the longest query first, and behind it, if
    that has no room, the longest that has. ``step``: None for an evaluation."""
    versions: dict[PolicyName, VersionRange] = dict.fromkeys(
        config.policies, VersionRange.exactly(Version(0))
    )
    temperature = config.evaluation.temperature if step is None else None
    numbers = itertools.count()

    async def play(query: Query) -> TrajectoryEnd:
        return await worker.run_trajectory(Trajectory(query, step, next(numbers), versions, temperature))

    ordered = sorted(queries, key=_size, reverse=True)
    ends = [await play(ordered[0])]
    if has_long_prompt(ends[0]):
        count = await _count_long(ordered, play)
        judge_long_prompts(config, recipe, LongPrompts(ends.pop(), count, len(ordered)), trial)
        ordered = ordered[count:]
    while ordered and len(ends) < _TRIES:
        if ends and (ends[-1].failure is None or ends[-1].trajectory.has_overrun):
            break
        ends.append(await play(ordered[len(ends) % len(ordered)]))
    if ends:
        judge_ends(config, recipe, ends, trial)
    return ends


def _size(query: Query) -> int:
    """Its length: a prompt has the text, and often parts of the data."""
    return len(query.text) + len(repr(query.data))


async def _count_long(ordered: Sequence[Query], play: Callable[[Query], Awaitable[TrajectoryEnd]]) -> int:
    """The number of queries whose prompt is too long, of which ``ordered`` begins with one: by bisection."""
    long, fitting = 0, len(ordered)
    while fitting - long > 1:
        middle = (long + fitting) // 2
        if has_long_prompt(await play(ordered[middle])):
            long = middle
        else:
            fitting = middle
    return fitting


@contextlib.contextmanager
def _working_directory(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700)
    with contextlib.chdir(folder):
        yield


@contextlib.contextmanager
def _unawaited_coroutines() -> Iterator[list[str]]:
    """Collects Python's warnings of coroutines that were never awaited, each with the lines that made it."""
    messages: list[str] = []
    depth = sys.get_coroutine_origin_tracking_depth()
    sys.set_coroutine_origin_tracking_depth(_FRAMES)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield messages
            gc.collect()
            messages += [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    finally:
        sys.set_coroutine_origin_tracking_depth(depth)
