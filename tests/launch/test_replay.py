"""Trajectories that come again: in the config, and in runs that end, are killed and resumed."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.orchestrator.checkpoint import load
from flexmarl.actors.sample_id import SampleId
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.simulate.simulated_faults import FaultKind, FaultPlan
from flexmarl.launch.simulate.simulation import Simulation, simulate

from .run_files import step_lines, trained

GAME = Path(__file__).parent / "recipes" / "self_play"
"""The longer answer wins: with a simulated engine the rewards of a group differ."""
ASYNC = ("mode=async", "max_staleness=3", "agents.player.algorithm.correction=decoupled")
RECENT = "replay={name: recent, share: 0.5}"


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ((RECENT,), r"replay\.name=recent is for mode=async: mode=strict trains each sample by the version"),
        (("mode=sync", RECENT), r"replay\.name=recent is for mode=async: mode=sync"),
        (
            (*ASYNC, "replay={name: recent, max_staleness: 4}"),
            r"replay\.max_staleness=4 is more than the run's own max_staleness=3",
        ),
        (
            ("mode=async", "replay={name: successes}", "agents.player.algorithm.correction=none"),
            r"correction=none gives old samples no weight of their version: write decoupled",
        ),
        ((*ASYNC, RECENT, "agents.player.algorithm.rewards=turn"), r"rewards=turn rewards turns"),
        ((*ASYNC, RECENT, "agents.player.sampling.top_p=0.9"), r"agents\.player\.sampling has top_k, top_p or min_p"),
        ((*ASYNC, "replay={name: all}"), r"replay.*none.*recent.*successes"),
    ],
)  # fmt: skip
def test_a_replay_that_does_not_fit_is_refused_by_name(settings: tuple[str, ...], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        resolve(str(GAME), settings)


def simulated(tmp_path: Path, name: str, *settings: str, **options: Any) -> Simulation:
    config = resolve(str(GAME), [*ASYNC, *settings])
    made = simulate(config, tmp_path / name, 1, **options)
    assert made.result is not None and made.result.last_step == config.training.steps
    return made


def samples(run: Simulation) -> Counter[SampleId]:
    """The number of times that each sample was trained."""
    counts = trained(run.directory.path, "player")
    return Counter({SampleId.parse(name): count for name, count in counts.items()})


@pytest.mark.parametrize("name", ["recent", "successes"])
def test_groups_come_again_within_the_bound_of_their_age(tmp_path: Path, name: str) -> None:
    run = simulated(tmp_path, "run", f"replay={{name: {name}, share: 0.5}}", "training.steps=12")
    counts = samples(run)
    again = [sample for sample in counts if "~" in sample.query]
    assert again and set(counts.values()) == {1}
    for sample in again:
        first = [each.step for each in counts if each.query == sample.query.split("~")[0]]
        assert first and min(step or 0 for step in first) <= (sample.step or 0), "it was trained before"
    steps = step_lines(run.directory.path)
    assert sum(step["replayed_groups"] for step in steps) >= len({sample.query for sample in again})
    assert max(step["max_staleness"] for step in steps) <= 3
    newest = max(run.directory.checkpoints.glob("step_*[0-9]"))
    state = load(newest)
    assert state.replay is not None and state.replay.replays == sum(step["replayed_groups"] for step in steps)
    assert not state.queries.logged, "programs have sent no group"


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_run_continues_with_the_groups_of_its_checkpoint(tmp_path: Path, seed: int) -> None:
    kills = FaultPlan(every_s=0.7, most=3, kinds={FaultKind.FATAL_KILL: 1.0}).draw(seed)
    settings = [
        RECENT, f"seed={seed}", "training.steps=10", "checkpoint.every=2", "supervision.heartbeat_s=0.2",
        "supervision.missed_heartbeats=2", "supervision.max_restarts=100", "rollout.turn_retries=100",
    ]  # fmt: skip
    run = simulated(tmp_path, "killed", *settings, planned_faults=kills)
    assert run.attempts > 1
    counts = samples(run)
    assert set(counts.values()) == {1}, "none is trained twice under one name"
    numbers = [
        int(query.split("~")[1]) for query in {sample.query for sample in counts if "~" in sample.query}
    ]
    assert numbers and len(numbers) == len(set(numbers)), "no number of a replay is used twice"
    assert max(step["max_staleness"] for step in step_lines(run.directory.path)) <= 3
