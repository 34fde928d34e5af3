"""The choice of the explorations that are played again, and a group that explores."""

import dataclasses
from collections.abc import Callable

import pytest

from flexmarl.actors.messages import GenerateRequest, GroupClosed, Query
from flexmarl.actors.names import PolicyName, Step
from flexmarl.actors.rollout.groups.explorations import choose, have_no_contrast
from flexmarl.actors.rollout.rollout import Rollout
from flexmarl.actors.rollout.trajectory import Trajectory
from flexmarl.actors.rollout.trajectory_rewards import Amounts

from ..fake_cluster import SOLVER, FakeCluster, FakeInstance, serve, start_step

SCOUT = PolicyName("scout")
FULL, CHEAP = 65, 66
LENGTH = """turn = await agents["solver"].generate("x")
    return Rewards(solver=float(len(turn.text)))"""


def test_the_best_and_the_worst_half_are_chosen() -> None:
    rewards = dict(enumerate([0.5, 0.1, 0.9, 0.4, 0.8, 0.0]))
    assert choose(rewards, 6, 4) == [1, 2, 4, 5]
    assert choose(rewards, 6, 3) == [2, 4, 5], "of an odd number the better half is the larger one"
    assert choose(rewards, 6, 1) == [2]
    assert choose(rewards, 6, 6) == [*range(6)]


def test_of_equal_rewards_the_first_are_chosen_once_each() -> None:
    assert choose(dict.fromkeys(range(8), 1.0), 8, 4) == [0, 1, 2, 3]
    assert choose(dict(enumerate([0.0, 0.0, 0.0, 1.0])), 4, 2) == [0, 3]


def test_explorations_that_failed_are_chosen_only_if_there_are_too_few_others() -> None:
    assert choose({1: 0.0, 2: 1.0, 3: 0.5}, 5, 2) == [1, 2]
    assert choose({1: 0.0, 2: 1.0}, 5, 4) == [0, 1, 2, 3]
    assert choose({}, 3, 2) == [0, 1]


def test_contrast_needs_two_rewards_that_differ() -> None:
    assert not have_no_contrast({0: 0.0, 1: 1.0})
    assert have_no_contrast({0: 1.0, 1: 1.0})
    assert not have_no_contrast({0: 1.0}) and not have_no_contrast({})


# --------------------------------------------------------------------------- a group


def lengths(token: int, of: Callable[[int], int]) -> FakeInstance:
    """Answers each trajectory with as many of one token as ``of`` its number."""

    def answer(request: GenerateRequest) -> tuple[int, ...]:
        return (token,) * of(int(request.sample_id.rpartition("_")[2]))

    return FakeInstance(answer)


async def explored(
    cluster: FakeCluster, of: Callable[[int], int], body: str = LENGTH, **config: object
) -> tuple[Rollout, GroupClosed]:
    """A group of 2 of 5 explorations, whose rewards are ``of`` their numbers."""
    cluster.explorers = {"solver": "scout"}
    cluster.instances = {
        "solver": [lengths(FULL, lambda number: 1 + number)],
        "scout": [lengths(CHEAP, of), lengths(CHEAP, of)],
        "judge": cluster.instances["judge"],
    }
    cluster.tokenizers["scout"] = "one"
    rollout = await cluster.open(body, explorations={"count": 5, **config}, replacement_queries=1)
    await serve(rollout, "solver", 3)
    await start_step(rollout, 1, [Query("q", "2+2")], 2, {"solver": 3, "judge": 0})
    return rollout, await cluster.closed()


async def test_only_what_is_played_again_by_the_policy_itself_is_trained(cluster: FakeCluster) -> None:
    _, group = await explored(cluster, lambda number: [3, 9, 4, 1, 5][number])
    rows = await cluster.rows("solver", 3, 2)
    assert [row.sample_id for row in sorted(rows, key=lambda row: row.sample_id)] == ["1:q_0_1", "1:q_0_3"]
    assert {token for row in rows for token in row.tokens} == {FULL}
    assert sorted(row.reward for row in rows) == [2.0, 4.0], "those of the second time"
    figures = {"explorations": 5, "explored_tokens": 22, "failed_explorations": 0, "unlike_explorations": 2}
    assert group.samples[SOLVER] == 2 and group.generated_tokens == 6
    assert {name: group.figures[name] for name in figures} == figures


async def test_a_turn_that_is_played_again_has_the_seed_and_the_version_of_its_exploration(
    cluster: FakeCluster,
) -> None:
    await explored(cluster, lambda number: 1 + number)
    explorations = [request for fake in cluster.instances["scout"] for request in fake.asked]
    (full,) = cluster.instances["solver"]
    assert len(explorations) == 5 and len(full.asked) == 2
    assert {request.policy for request in explorations} == {SCOUT}
    by_id = {request.sample_id: request for request in explorations}
    for request in full.asked:
        assert dataclasses.replace(by_id[request.sample_id], policy=request.policy) == request


async def test_a_query_without_contrast_is_skipped_and_costs_no_token_of_the_policy(
    cluster: FakeCluster,
) -> None:
    _, group = await explored(cluster, lambda number: 2, skip_equal=True)
    assert group.dropped == "its 5 explorations have equal rewards" and not group.samples[SOLVER]
    assert not cluster.instances["solver"][0].asked and group.figures["explored_tokens"] == 10


async def test_explorations_that_fail_leave_their_places_to_others(cluster: FakeCluster) -> None:
    body = LENGTH + ' if len(turn.text) > 2 or turn.policy_version != 3 else Rewards(solver=float("nan"))'
    _, group = await explored(cluster, lambda number: [1, 9, 4, 3, 1][number], body)
    assert group.figures["failed_explorations"] == 2
    rows = await cluster.rows("solver", 3, group.samples[SOLVER])
    assert [row.sample_id for row in rows] == ["1:q_0_3"], "and 1, which fails at full precision"
    assert len(group.failures) == 1


async def test_groups_without_explorations_and_submitted_queries_are_played_once(
    cluster: FakeCluster,
) -> None:
    rollout, _ = await explored(cluster, lambda number: 1 + number)
    await start_step(rollout, 2, [Query("p", "")], 2, {"solver": 3, "judge": 0}, submitted=["p"])
    group = await cluster.closed()
    assert group.samples[SOLVER] == 2 and not group.figures["explorations"]


@pytest.mark.usefixtures("cluster")
async def test_an_exploration_has_no_samples() -> None:
    trajectory = Trajectory(Query("q", ""), Step(1), 0, {})
    trajectory.is_exploration = True
    with pytest.raises(AssertionError, match="other weights than those that are trained"):
        trajectory.samples(Step(1), 0, [SOLVER], Amounts())
