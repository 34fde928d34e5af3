"""Demonstrations in a rollout worker: samples are the turns of the policy, and other trajectories stay as they are."""

import json
from typing import Any

import pytest

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import RecipeError
from flexmarl.actors.messages import GenerateRequest, Query
from flexmarl.actors.rollout.rollout import Rollout

from .fake_cluster import QUERY, SOLVER, FakeCluster, evaluate, serve, start_step

WALK = """
    ...

from flexmarl.actors import Environment

class Walk(Environment):
    async def reset(self, query):
        self.took = []
        return {"solver": query.text}

    async def step(self, turns):
        self.took.append(turns["solver"].text)
        return Rewards(solver=9.0, metrics={"accuracy": 1.0}) if len(self.took) == 3 else {"solver": "?"}

workflow = Walk
"""
ACTIONS = ["x", "xx", "x"]
# By trajectory: the lengths of its answers, of which the fake instance makes texts of as many x.
LENGTHS = {0: (1, 2, 1), 1: (1, 3, 1), 2: (3, 3, 1)}


def answer(request: GenerateRequest) -> tuple[int, ...]:
    *_, turn, trajectory = request.sample_id.split("_")
    return (65,) * LENGTHS[int(trajectory)][int(turn)]


@pytest.fixture
def walk_cluster(cluster: FakeCluster) -> FakeCluster:
    cluster.credit = {"solver": CreditConfig(name="at_grpo", scale_rewards=False)}
    for fake in cluster.instances["solver"]:
        fake._answer = answer
    return cluster


async def opened(cluster: FakeCluster, query: str = QUERY.text, **options: Any) -> Rollout:
    line = {"query": query, "actions": {"solver": ACTIONS}}
    (cluster.folder / "walks.jsonl").write_text(json.dumps(line))
    rollout = await cluster.open(WALK, demonstrations={"file": "walks.jsonl", **options})
    await serve(rollout, "solver", 0)
    return rollout


async def test_samples_are_the_turns_of_the_policy_and_patches_are_in_later_prompts(
    walk_cluster: FakeCluster,
) -> None:
    rollout = await opened(walk_cluster, most=1)
    await start_step(rollout, 1, [QUERY], 3, {"solver": 0, "judge": 0})
    group = await walk_cluster.closed()
    assert not group.failures and group.samples[SOLVER] == 8
    rows = sorted(await walk_cluster.rows("solver", 0, 8), key=lambda sample: sample.sample_id)
    lengths = {sample.sample_id: len(sample.tokens) for sample in rows}
    assert lengths == {
        **{f"1:q7_{turn}_{number}": LENGTHS[number][turn] for number in (0, 1) for turn in range(3)},
        "1:q7_0_2": 3,
        "1:q7_1_2": 3,  # the second departure has ended trajectory 2
    }
    assert {token for sample in rows for token in sample.tokens} == {65}, "no token of a recorded action"
    # The share of the agreement, and the return: 1 + 7/4, 1 + 3/2, 1 + 1; 2/3 + 1, 2/3 + 0, 2/3 + 1; 0, 0.
    assert {sample.sample_id: pytest.approx(sample.reward) for sample in rows} == {
        "1:q7_0_0": 2.75, "1:q7_1_0": 2.5, "1:q7_2_0": 2.0,
        "1:q7_0_1": 5 / 3, "1:q7_1_1": 2 / 3, "1:q7_2_1": 5 / 3,
        "1:q7_0_2": 0.0, "1:q7_1_2": 0.0,
    }  # fmt: skip
    mean = (2.5 + 2 / 3) / 3
    second = {s.sample_id: s.advantage for s in rows if s.sample_id.startswith("1:q7_1_")}
    assert second == pytest.approx({"1:q7_1_0": 2.5 - mean, "1:q7_1_1": 2 / 3 - mean, "1:q7_1_2": -mean})
    prompts = {sample.sample_id: "".join(map(chr, sample.prompt_tokens)) for sample in rows}
    assert prompts["1:q7_2_0"] == "2+2A?AA?" and prompts["1:q7_2_1"] == "2+2A?xx?"
    assert group.metrics == {"followed": [1.0, 1 / 3, 0.0]}
    figures = ("demonstrated_trajectories", "patched_turns", "departed_trajectories")
    assert [group.figures[name] for name in figures] == [3, 2, 1]


async def test_evaluations_submitted_queries_and_those_without_a_demonstration_are_the_policys_alone(
    walk_cluster: FakeCluster,
) -> None:
    rollout = await opened(walk_cluster, most=0)
    evaluation = await evaluate(rollout, [QUERY], {"solver": 0, "judge": 0})
    assert evaluation.metrics["accuracy"] == 1.0
    other = Query("q8", "3+3")
    await start_step(rollout, 1, [QUERY], 1, {"solver": 0, "judge": 0}, submitted=["q7"])
    submitted = await walk_cluster.closed()
    await start_step(rollout, 2, [other], 1, {"solver": 0, "judge": 0})
    for group in (submitted, await walk_cluster.closed()):
        assert group.metrics == {"accuracy": [1.0]} and group.rewards[SOLVER] == [9.0]
        assert "demonstrated_trajectories" not in group.figures


async def test_a_query_that_comes_again_under_another_id_has_its_demonstration(
    walk_cluster: FakeCluster,
) -> None:
    rollout = await opened(walk_cluster)
    await start_step(rollout, 1, [Query("q7#3", QUERY.text)], 1, {"solver": 0, "judge": 0})
    assert (await walk_cluster.closed()).figures["demonstrated_trajectories"] == 1


async def test_a_worker_without_demonstrations_to_follow_is_refused_when_it_is_made(
    cluster: FakeCluster,
) -> None:
    with pytest.raises(RecipeError, match="the workflow is a function"):
        await cluster.open("return Rewards()", demonstrations={"file": "walks.jsonl"})
