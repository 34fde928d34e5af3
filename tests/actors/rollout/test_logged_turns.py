"""Groups of trajectories that ended before: samples like those of a workflow, and no figures of a rollout."""

import math
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.columns.declared_columns import Column
from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import LoggedTrajectory, LoggedTurn, Query, VersionRange
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.rollout.logged_turns import take_logged
from flexmarl.actors.rollout.rollout_config import SamplingConfig
from flexmarl.actors.rollout.rollout_setup import RolloutAgent
from flexmarl.actors.rollout.trajectory import Trajectory
from flexmarl.core.system import ActorSystem

from .fake_cluster import JUDGE, QUERY, SOLVER, FakeCluster, start_step

REWARD = Column(type="float", required=True, written_by="external")


@pytest.fixture
async def cluster(system: ActorSystem, tmp_path: Path) -> FakeCluster:
    return FakeCluster(system, tmp_path)


def turn(agent: AgentName = SOLVER, version: int | None = None, tokens: int = 2) -> LoggedTurn:
    return LoggedTurn(
        agent,
        ["2+2="],
        "4",
        (50, 61),
        (52,) * tokens,
        (-0.5,) * tokens,
        0.7,
        None if version is None else Version(version),
    )


def logged(reward: float, *turns: LoggedTurn) -> LoggedTrajectory:
    return LoggedTrajectory([*turns], {one.agent: reward for one in turns})


async def test_a_group_is_put_with_advantages_and_the_steps_version(cluster: FakeCluster) -> None:
    """No instance serves anything, and the workflow would fail."""
    rollout = await cluster.open("raise ValueError('it is not called')")
    trajectories = [logged(float(n), turn(), turn(JUDGE)) for n in range(3)]
    await start_step(
        rollout, 5, [QUERY], 8, {"solver": 4, "judge": 2}, submitted=["q7"], logged={"q7": trajectories}
    )
    group = await cluster.closed()
    assert (group.samples, group.failures, group.dropped) == ({SOLVER: 3, JUDGE: 3}, [], "")
    assert (group.rewards, group.generated_tokens, group.waited_s) == ({}, 0, math.inf)
    assert group.figures == {"logged_trajectories": 3, "late_trajectories": 0, "shared_groups": 0}
    assert [answer.rewards for answer in group.trajectories] == [
        {SOLVER: float(n), JUDGE: float(n)} for n in range(3)
    ]
    rows = await cluster.rows("solver", 4, 3)
    assert [(row.sample_id, row.reward, row.advantage) for row in rows] == [
        (f"5:q7_0_{n}", float(n), n - 1.0) for n in range(3)
    ]
    assert {(row.tokens, row.logprobs, row.temperature, row.policy_version) for row in rows} == {
        ((52, 52), (-0.5, -0.5), 0.7, 4)
    }
    assert {row.policy_version for row in await cluster.rows("judge", 2, 3)} == {2}


async def test_log_probs_that_are_unknown_reach_the_trainer_as_such(cluster: FakeCluster) -> None:
    rollout = await cluster.open("raise ValueError('it is not called')")
    blank = LoggedTurn(SOLVER, [], "4", (50,), (52,), (math.nan,), 1.0, Version(4))
    await start_step(
        rollout, 5, [QUERY], 1, {"solver": 4, "judge": 2}, submitted=["q7"],
        logged={"q7": [logged(1.0, blank), logged(0.0, blank)]},
    )  # fmt: skip
    assert (await cluster.closed()).samples[SOLVER] == 2
    assert all(math.isnan(row.logprobs[0]) for row in await cluster.rows("solver", 4, 2))


@pytest.mark.parametrize(
    ("credit", "column", "expected"),
    [
        ({}, None, [1.0, 1.0]),
        ({}, REWARD, [1.0, 1.0]),
        ({"rewards": "both"}, None, [1.0, 1.0]),
        ({"rewards": "both"}, REWARD, [0.0, 1.0]),
        ({"rewards": "turn"}, None, [0.0, 1.0]),
        ({"rewards": "turn"}, REWARD, [0.0, 1.0]),
    ],
)
async def test_its_reward_is_used_as_the_agents_algorithm_uses_rewards(
    credit: dict[str, Any], column: Column | None, expected: list[float]
) -> None:
    """A line has one reward: the last turn's where turns alone are rewarded. More turns than one are refused then."""
    columns = {} if column is None else {"reward": column}
    agents = {SOLVER: RolloutAgent(PolicyName("solver"), SamplingConfig(), CreditConfig(**credit), columns)}
    versions = {PolicyName("solver"): VersionRange.exactly(Version(3))}
    trajectory = Trajectory(Query("q", "2+2"), Step(5), 0, versions)
    take_logged(trajectory, logged(1.0, turn(), turn(version=1)), agents)
    samples = trajectory.samples(Step(5), 0, [SOLVER], trajectory.rewards.used)
    assert [sample.reward for sample in samples] == expected
    assert [sample.policy_version for sample in samples] == [3, 1]
    assert trajectory.oldest_versions() == {SOLVER: 1}
