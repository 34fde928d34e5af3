"""Queries beyond the batch: in the config, and in runs that end, are killed and resumed in virtual time."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.sample_id import SampleId
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.simulate.simulated_faults import FaultKind, FaultPlan
from flexmarl.launch.simulate.simulation import Simulation, simulate

from .run_files import step_lines, trained

GAME = Path(__file__).parent / "recipes" / "self_play"
ASYNC = ("mode=async", "max_staleness=1", "agents.player.algorithm.correction=decoupled")
EXTRA = ("training.queries_per_step=4", "rollout.extra_queries=2")


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (EXTRA, r"rollout\.extra_queries=2 is for mode=async: .* mode=strict trains each sample"),
        (("mode=sync", *EXTRA), r"rollout\.extra_queries=2 is for mode=async: .* mode=sync"),
        ((*ASYNC, *EXTRA, "rollout.extra_queries=4"), r"=4 must be less than training\.queries_per_step=4"),
        ((*ASYNC, *EXTRA, "rollout.extra_queries=-1"), r"rollout\.extra_queries=-1: .* equal to 0"),
        (
            (*ASYNC, *EXTRA, "rollout.replacement_queries=3"),
            r"can't be used with rollout\.replacement_queries=3",
        ),
        (
            (*ASYNC, *EXTRA, "agents.player.global_batch=64"),
            r"with global_batch needs max_staleness=2: .* max_staleness is 1",
        ),
    ],
)
def test_extra_queries_that_do_not_fit_are_refused_by_name(settings: tuple[str, ...], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        resolve(str(GAME), settings)


def simulated(tmp_path: Path, *settings: str, **options: Any) -> Simulation:
    config = resolve(str(GAME), [*ASYNC, *EXTRA, *settings])
    run = simulate(config, tmp_path / "run", 1, **options)
    assert run.result is not None and run.result.last_step == config.training.steps
    return run


def samples(run: Simulation) -> Counter[SampleId]:
    """The number of times that each sample was trained."""
    counts = trained(run.directory.path, "player")
    return Counter({SampleId.parse(name): count for name, count in counts.items()})


def numbers(counts: Counter[SampleId]) -> list[int]:
    """The numbers of the queries' draws; one twice if two steps have trained it."""
    return sorted(int(query[1:]) for _, query in {(sample.step, sample.query) for sample in counts})


def test_open_queries_are_trained_by_the_next_step_and_none_is_lost(tmp_path: Path) -> None:
    run = simulated(tmp_path, "training.steps=8", "checkpoint.every=4")
    counts = samples(run)
    assert set(counts.values()) == {1}
    assert numbers(counts) == [*range(len(numbers(counts)))], "each query that was drawn, once"
    assert len(numbers(counts)) >= 8 * 4
    carried = {line["step"]: line["carried_queries"] for line in step_lines(run.directory.path)}
    assert sum(carried.values()) > 0 and carried[4] == carried[8] == 0, "a checkpoint has no open query"
    assert max(line["max_staleness"] for line in step_lines(run.directory.path)) == 1


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_run_trains_each_query_once(tmp_path: Path, seed: int) -> None:
    kills = FaultPlan(every_s=0.7, most=3, kinds={FaultKind.FATAL_KILL: 1.0}).draw(seed)
    run = simulated(
        tmp_path, f"seed={seed}", "training.steps=9", "checkpoint.every=3", "supervision.heartbeat_s=0.2",
        "supervision.missed_heartbeats=2", "supervision.max_restarts=100", "rollout.turn_retries=100",
        planned_faults=kills,
    )  # fmt: skip
    assert run.attempts > 1
    counts = samples(run)
    assert set(counts.values()) == {1} and len(numbers(counts)) >= 9 * 4
    assert numbers(counts) == [*range(len(numbers(counts)))], "each query that was drawn, once"
    assert max(line["max_staleness"] for line in step_lines(run.directory.path)) <= 1
