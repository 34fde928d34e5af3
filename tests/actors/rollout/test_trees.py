"""Trees in a rollout worker: the samples that they leave, their figures, and what stays one line."""

import asyncio
import itertools
from pathlib import Path

import pytest

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import RecipeError
from flexmarl.actors.messages import GenerateRequest, Generation, Sample, TextTo
from flexmarl.actors.trees.success_model import FEATURES, PrefixEnd, prefix_features
from flexmarl.core.actor import endpoint
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.memory import MemoryNetwork

from .fake_cluster import QUERY, SOLVER, FakeCluster, FakeInstance, evaluate, serve, start_step

TREE = """
    ...

import copy
from flexmarl.actors import Environment

class Sum(Environment):
    async def reset(self, query):
        self.turns_taken = []
        return {"solver": query.text}

    async def step(self, turns):
        self.turns_taken = [*self.turns_taken, turns["solver"]]
        return self.paid() if len(self.turns_taken) == 2 else {"solver": "more"}

    async def fork(self):
        return copy.copy(self)

    async def interim(self):
        return self.paid()

    def paid(self):
        rewards = Rewards(metrics={"lines": 1.0})
        for turn in self.turns_taken:
            rewards.of(turn, float(len(turn.text)))
        return rewards

workflow = Sum
"""
GREEDY = {"branch": "greedy", "width": 3}
# By the turn's number: two rounds of three candidates.
LENGTHS = (1, 3, 2, 2, 1, 6)


@pytest.fixture
def tree_cluster(cluster: FakeCluster) -> FakeCluster:
    cluster.credit = {"solver": CreditConfig(name="at_grpo", rewards="turn", scale_rewards=False)}
    for fake in cluster.instances["solver"]:
        fake._answer = answer
    return cluster


def answer(request: GenerateRequest) -> tuple[int, ...]:
    return (65,) * LENGTHS[int(request.sample_id.split("_")[-2])]


async def rows(cluster: FakeCluster, count: int) -> list[Sample]:
    return sorted(await cluster.rows("solver", 0, count), key=lambda sample: sample.sample_id)


async def test_candidates_become_samples_that_are_compared_with_those_of_their_prompt(
    tree_cluster: FakeCluster,
) -> None:
    rollout = await tree_cluster.open(TREE, tree=GREEDY)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 1, {"solver": 0, "judge": 0})
    group = await tree_cluster.closed()
    assert not group.failures and group.samples[SOLVER] == 6
    found = await rows(tree_cluster, 6)
    assert [sample.sample_id for sample in found] == [f"1:q7_{turn}_0" for turn in range(6)]
    assert [sample.reward for sample in found] == [*map(float, LENGTHS)]
    assert [sample.advantage for sample in found] == [-1.0, 1.0, 0.0, -1.0, -2.0, 3.0]
    assert (
        len({sample.prompt_tokens for sample in found[:3]}) == len({s.prompt_tokens for s in found[3:]}) == 1
    )
    assert found[3].prompt_tokens[: len(found[1].prompt_tokens) + 3] == (*found[1].prompt_tokens, 65, 65, 65)
    assert (group.figures["branch_points"], group.figures["cut_lines"]) == (2, 4)
    assert group.figures["untrained_branch_turns"] == group.figures["gateway_masked"] == 0
    assert group.turns[SOLVER].figures["tokens"] == sum(LENGTHS), "the candidates cost tokens, too"
    assert group.metrics == {"lines": [1.0]}


class Slow(FakeInstance):
    """Answers after a time that follows from the seed of the turn: turns end in another order than they began."""

    def __init__(self, factor: int) -> None:
        super().__init__(lambda request: (65,) * (1 + request.seed % 4))
        self._factor = factor

    @endpoint
    async def generate(self, request: GenerateRequest, text_to: TextTo | None = None) -> Generation:
        await asyncio.sleep(request.seed * self._factor % 7)
        return await super().generate(request, text_to)


@pytest.mark.parametrize(
    ("branch", "options"),
    [
        ("greedy", {}),
        ("entropy", {"entropy": 0.5, "least_confidence": 0.0}),
        ("predicted", {"lines": 6, "gain": 0.1}),
    ],
)
async def test_a_tree_that_begins_again_is_the_same_whichever_turns_end_first(
    tmp_path: Path, branch: str, options: dict[str, float]
) -> None:
    lives = []
    for factor in (1, 3):
        (tmp_path / str(factor)).mkdir()
        async with ActorSystem("tests", wire=MemoryNetwork().wire("tests")) as system:
            cluster = FakeCluster(system, tmp_path / str(factor))
            cluster.credit = {"solver": CreditConfig(name="at_grpo", rewards="turn")}
            cluster.instances["solver"] = [Slow(factor), Slow(factor)]
            rollout = await cluster.open(TREE, tree={"branch": branch, "width": 3, **options})
            await serve(rollout, "solver", 0)
            await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
            group = await cluster.closed()
            assert group.figures["branch_points"] > 1
            lives.append([(s, s.advantage) for s in await rows(cluster, group.samples[SOLVER])])
    assert lives[0] == lives[1] and len(lives[0]) > 8


async def test_a_group_reports_its_prefixes_and_the_weights_of_a_step_decide_on_its_branches(
    tree_cluster: FakeCluster,
) -> None:
    rollout = await tree_cluster.open(TREE, tree={"branch": "predicted", "width": 3, "lines": 3})
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
    group = await tree_cluster.closed()
    root = prefix_features({"solver": "2+2"}, 0)
    after = prefix_features({"solver": "more"}, 1)
    assert group.figures["branch_points"] == 2
    # All have the mean reward of their turns, 1 or more; the lines of a trajectory part before "more".
    assert group.prefixes == 2 * [PrefixEnd(root, 1.0, 3), *3 * [PrefixEnd(after, 1.0, 1)]]

    weights = [*[0.0] * FEATURES, 1.0]
    for place in (*root, *after):
        weights[place] = 9.0
    await start_step(rollout, 2, [QUERY], 2, {"solver": 0, "judge": 0}, success_state=weights)
    sure = await tree_cluster.closed()
    assert sure.figures["branch_points"] == 0
    assert sure.prefixes == 2 * [PrefixEnd(root, 1.0, 1), PrefixEnd(after, 1.0, 1)]


async def test_evaluations_and_submitted_queries_are_one_line(tree_cluster: FakeCluster) -> None:
    rollout = await tree_cluster.open(TREE, tree=GREEDY)
    await serve(rollout, "solver", 0)
    evaluation = await evaluate(rollout, [QUERY], {"solver": 0, "judge": 0})
    assert evaluation.failures == []
    asked = list(itertools.chain(*(fake.asked for fake in tree_cluster.instances["solver"])))
    assert len(asked) == 2
    await start_step(rollout, 1, [QUERY], 1, {"solver": 0, "judge": 0}, submitted=["q7"])
    group = await tree_cluster.closed()
    assert len(group.trajectories[0].turns) == 2 and group.figures["branch_points"] == 0


async def test_a_workflow_that_cant_branch_is_refused_when_the_worker_is_made(cluster: FakeCluster) -> None:
    with pytest.raises(RecipeError, match="the workflow is a function"):
        await cluster.open("return Rewards()", tree=GREEDY)
