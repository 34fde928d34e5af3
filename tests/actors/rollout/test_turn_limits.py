"""Limits of a trajectory's turns and tokens: agent and limit are named, and the workflow may catch the error."""

from typing import Any

import pytest

from flexmarl.actors.rollout.rollout_config import SamplingConfig

from .fake_cluster import JUDGE, QUERY, SOLVER, FakeCluster, serve, start_step

ALWAYS = """
    from flexmarl.actors.errors import LimitReached
    turns = 0
    try:
        while True:
            await agents["solver"].generate("?")
            turns += 1
    except LimitReached as limit:
        assert (limit.agent, limit.key, limit.limit) == {expected!r}, limit
        await agents["judge"].generate("?") if {judged} else None
        return Rewards(solver=turns, judge=0.0)
"""


async def solved(
    cluster: FakeCluster, expected: tuple[str, str, int], judged: bool = False, **config: Any
) -> None:
    rollout = await cluster.open(ALWAYS.format(expected=expected, judged=judged), **config)
    for agent in ("solver", "judge"):
        await serve(rollout, agent, 0)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})


async def test_turns_of_all_agents_are_limited(cluster: FakeCluster) -> None:
    await solved(cluster, ("solver", "rollout.trajectory_turns", 3), trajectory_turns=3)
    group = await cluster.closed()
    assert group.rewards[SOLVER] == [3.0, 3.0] and group.failures == []
    assert group.figures["limited_trajectories"] == 2, "of the trajectories, which count with their rewards"


async def test_turns_of_an_agent_are_limited_and_another_may_go_on(cluster: FakeCluster) -> None:
    cluster.sampling["solver"] = SamplingConfig(trajectory_turns=2)
    await solved(cluster, ("solver", "agents.solver.sampling.trajectory_turns", 2), judged=True)
    group = await cluster.closed()
    assert group.rewards[SOLVER] == [2.0, 2.0] and group.samples[JUDGE] == 2


@pytest.mark.parametrize("of_agent", [True, False])
async def test_tokens_are_limited_and_the_last_turn_is_cut(cluster: FakeCluster, of_agent: bool) -> None:
    for fake in cluster.instances["solver"]:
        fake._answer = lambda request: (65,) * min(10, request.max_new_tokens)
    key, config = "rollout.trajectory_tokens", {"trajectory_tokens": 25}
    if of_agent:
        config = {}
        key = "agents.solver.sampling.trajectory_tokens"
        cluster.sampling["solver"] = SamplingConfig(trajectory_tokens=25)
    await solved(cluster, ("solver", key, 25), False, **config)
    group = await cluster.closed()
    assert group.rewards[SOLVER] == [3.0, 3.0] and group.turns[SOLVER].figures["tokens"] == 50


async def test_a_limit_that_is_not_caught_fails_the_trajectory_by_name(cluster: FakeCluster) -> None:
    body = """
    for _ in range(2 if workflow.calls else 1):
        workflow.calls += 1
        await agents["solver"].generate("?")
    return Rewards(solver=1.0)
workflow.calls = 0
"""
    rollout = await cluster.open(body, trajectory_turns=1)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
    group = await cluster.closed()
    (failure,) = group.failures
    assert failure.error.startswith("LimitReached: agent solver: no further turn, the trajectory has reached")
    assert "rollout.trajectory_turns=1" in failure.error
    assert group.samples[SOLVER] == 1 and group.figures["limited_trajectories"] == 1, "its sibling stays"
