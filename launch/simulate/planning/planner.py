"""Plays the candidates of a plan, one after the other, in the order that the search chooses."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ....actors.errors import ConfigError
from ...hosts import env
from ...hosts.placement.plan import DoesNotFit
from ..recorded_workload import RecordedWorkload
from ..scenario import Scenario, read_scenario
from ..scenario_run import run_scenario
from ..summary import Summary
from .candidates import Candidate, candidates
from .planned_settings import settings_of
from .planned_space import PlannedSpace
from .search import Search
from .step_bound import StepBound


@dataclass(frozen=True, slots=True)
class ScenarioFile:
    """A scenario, read again for each candidate. ``settings``: with the cluster of the budget. ``recorded``:
    see ``read_scenario``."""

    file: Path
    settings: Sequence[str]
    recorded: RecordedWorkload | None = None

    def read(self, settings: Sequence[str] = ()) -> Scenario:
        """With further settings. Raises ConfigError."""
        return read_scenario(self.file, [*self.settings, *settings], self.recorded)


@dataclass(slots=True)
class PlanOutcome:
    """``as_it_is``: the scenario without changes, or the reason that it does not fit. ``stopped``: by a person."""

    search: Search
    bounds: dict[Candidate, StepBound]
    refusals: list[str]
    summaries: dict[Candidate, Summary] = field(default_factory=dict)
    as_it_is: Summary | str = ""
    stopped: bool = False


def play_scenario(scenario: Scenario) -> Summary:
    """Its figures; the run's files are deleted. Raises ConfigError, and DoesNotFit."""
    with tempfile.TemporaryDirectory(prefix="flexmarl-plan-", dir=env.runtime_base()) as folder:
        return run_scenario(scenario, Path(folder) / "run", records_spans=False)


def search_plan(
    scenario_file: ScenarioFile,
    space: PlannedSpace,
    limit: int,
    notify: Callable[[str], None],
    play: Callable[[Scenario], Summary] = play_scenario,
) -> PlanOutcome:
    """At most ``limit`` simulations of candidates, and one of the scenario as it is. ``notify``: gets a line before and
    after each. A ctrl-C ends the search, not its result. Raises DoesNotFit if there is no candidate."""
    bounds = {candidate: space.model.bound(candidate) for candidate in candidates(space.space)}
    if not bounds:
        raise DoesNotFit([_too_few(space)])
    outcome = PlanOutcome(
        Search({candidate: bound.step_s for candidate, bound in bounds.items()}, limit),
        bounds,
        list(space.refusals),
    )
    notify(
        f"{len(bounds)} candidates; the lowest bound is {min(outcome.search.bounds.values()):.1f} s a step"
    )
    try:
        outcome.as_it_is = _play_unchanged(scenario_file, play)
        while (candidate := outcome.search.choose()) is not None:
            _try(candidate, scenario_file, outcome, notify, play)
    except KeyboardInterrupt:
        outcome.stopped = True
    return outcome


def _play_unchanged(scenario_file: ScenarioFile, play: Callable[[Scenario], Summary]) -> Summary | str:
    try:
        return play(scenario_file.read())
    except ConfigError as error:
        return str(error)


def _try(
    candidate: Candidate,
    scenario_file: ScenarioFile,
    outcome: PlanOutcome,
    notify: Callable[[str], None],
    play: Callable[[Scenario], Summary],
) -> None:
    search = outcome.search
    words = f"{len(search.seconds) + 1} of at most {search.limit}: {candidate.text()}"
    try:
        summary = play(scenario_file.read(settings_of(candidate, scenario_file.read())))
    except ConfigError as error:
        if isinstance(error, DoesNotFit):
            reason = error.problems[0]
            search.refuse(candidate, reason)
        else:  # of its own numbers, such as the micro-batch: others of its split may do
            reason = search.refusals[candidate] = str(error).partition("\n")[0]
        outcome.refusals.append(f"{candidate.text()}: {reason}")
        notify(f"{words}: refused: {reason}")
        return
    search.note(candidate, summary.step_s)
    outcome.summaries[candidate] = summary
    best_s = min(search.seconds.values())
    state = f"the fastest {best_s:.1f} s, {len(search.remaining)} may be faster"
    notify(f"{words}: {summary.step_s:.1f} s a step ({state})")


def _too_few(space: PlannedSpace) -> str:
    """The numbers of a budget that is too small."""
    rooms = space.space.policies
    instances = sum(room.tensor_parallel[0] for room in rooms.values())
    gang = max((room.ranks[0] for room in rooms.values() if room.ranks), default=0)
    return (
        f"{space.space.devices} devices are too few: an instance of each policy needs {instances}, and the largest "
        f"policy trains on {gang}"
    )
