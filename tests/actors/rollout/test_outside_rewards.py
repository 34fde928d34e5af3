"""Rewards that a program outside the run gives, from the workflow's end to the rows in the store."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.columns.column_refs import plain_cell
from flexmarl.actors.columns.declared_columns import OFFER_KEY, Column
from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import NotJudged, StoreError
from flexmarl.actors.messages import Query, UnjudgedSample
from flexmarl.actors.names import AgentName
from flexmarl.actors.orchestrator.evaluation import EvaluationRules
from flexmarl.actors.rollout.rollout import Rollout
from flexmarl.actors.store.store import Store
from flexmarl.actors.workflow import LARGEST_REWARD
from flexmarl.core.system import ActorSystem

from ...patience import PATIENCE_S
from .fake_cluster import QUERY, SOLVER, FakeCluster, evaluate, serve, start_step

REWARD = Column(type="float", required=True, written_by="external", timeout_s=PATIENCE_S)
ALONE = """
    turn = await agents["solver"].generate(query.text)
    turn.write(answer=turn.text, plan=[1, 2])
"""
COLUMNS = {"reward": REWARD, "answer": Column(type="str"), "plan": Column(type="tokens")}


async def opened(cluster: FakeCluster, body: str = ALONE, reward: Column = REWARD, **config: Any) -> Rollout:
    cluster.columns = {"solver": {**COLUMNS, "reward": reward}}
    rollout = await cluster.open(body, **config)
    for policy in ("solver", "judge"):
        await serve(rollout, policy, 0)
    return rollout


async def step(rollout: Rollout, trajectories: int = 3) -> None:
    await start_step(rollout, 1, [QUERY], trajectories, {"solver": 0, "judge": 0})


async def waiting(cluster: FakeCluster, count: int) -> list[dict[str, Any]]:
    """The samples that a judge finds, once there are as many."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = (await cluster.store.select("status = 'writing'", 100)).rows
            if len(found) == count:
                return sorted(found, key=lambda row: str(row["sample_id"]))
            await asyncio.sleep(0.01)


async def judge(cluster: FakeCluster, rewards: dict[str, float], agent: str = "solver") -> None:
    parts = {agent: {"sample_id": [*rewards], "reward": [*rewards.values()]}}
    await cluster.store.write("judge", parts)


@pytest.fixture
async def cluster(system: ActorSystem, tmp_path: Path) -> FakeCluster:
    return FakeCluster(system, tmp_path)


async def test_a_group_closes_with_the_judges_rewards_when_all_are_there(cluster: FakeCluster) -> None:
    rollout = await opened(cluster)
    await step(rollout)
    rows = await waiting(cluster, 3)
    assert [row["sample_id"] for row in rows] == ["1:q7_0_0", "1:q7_0_1", "1:q7_0_2"]
    assert {(row["reward"], row["step"], row["query"], row["policy_version"]) for row in rows} == {
        (None, 1, "q7", 0)
    }
    shown = await cluster.store.unjudged(SOLVER, ["text", "query_text", "tokens", "answer", "plan"])
    names = shown["sample_id"]
    assert names == [row["sample_id"] for row in rows]
    assert shown["answer"] == [row["answer"] for row in rows] and set("".join(shown["answer"])) == {"x"}
    assert shown["text"] == shown["answer"] and shown["query_text"] == ["2+2"] * 3
    assert [len(plain_cell(tokens)) for tokens in shown["tokens"]] == [*map(len, shown["text"])]
    assert [plain_cell(plan).tolist() for plan in shown["plan"]] == [[1, 2]] * 3
    await judge(cluster, {names[0]: 0.25, names[2]: 2.0})
    assert [row["sample_id"] for row in await waiting(cluster, 1)] == [names[1]]
    assert cluster.events.closed.empty()
    await judge(cluster, {names[1]: -1.0})
    closed = await cluster.closed()
    assert closed.rewards[SOLVER] == [0.25, -1.0, 2.0] and closed.samples[SOLVER] == 3
    for sample in await cluster.rows("solver", 0, 3):
        assert sample.reward == (0.25, -1.0, 2.0)[int(sample.sample_id[-1])]
        assert (sample.advantage, sample.group_size) == (sample.reward - 1.25 / 3, 3)


@pytest.mark.parametrize("use", ["trajectory", "turn", "both"])
async def test_turns_are_judged_one_by_one_if_their_rewards_count(cluster: FakeCluster, use: Any) -> None:
    cluster.credit["solver"] = CreditConfig(name="dr_grpo", rewards=use)
    body = ALONE + '    await agents["solver"].generate([turn, "?"])\n'
    rollout = await opened(cluster, body)
    await step(rollout, 1)
    names = ["1:q7_1_0"] if use == "trajectory" else ["1:q7_0_0", "1:q7_1_0"]
    assert [row["sample_id"] for row in await waiting(cluster, len(names))] == names
    await judge(cluster, {name: number + 0.5 for number, name in enumerate(names)})
    assert not (closed := await cluster.closed()).failures
    rewards = [sample.reward for sample in await cluster.rows("solver", 0, 2)]
    assert rewards == ([0.5, 0.5] if use == "trajectory" else [0.5, 1.5])
    assert closed.turn_rewards == ({} if use == "trajectory" else {SOLVER: [0.5, 1.5]})


async def test_other_agents_and_the_team_keep_the_workflows_rewards(cluster: FakeCluster) -> None:
    body = (
        ALONE + '    await agents["judge"].generate(turn.text)\n    return Rewards(judge=3.0).of_team(1.0)\n'
    )
    rollout = await opened(cluster, body)
    await step(rollout, 1)
    (row,) = await waiting(cluster, 1)
    await judge(cluster, {row["sample_id"]: 0.5})
    assert (await cluster.closed()).rewards == {"solver": [1.5], "judge": [4.0]}


async def test_without_a_judge_the_trajectories_fail_by_name_and_the_group_is_dropped(
    cluster: FakeCluster,
) -> None:
    late = REWARD.model_copy(update={"timeout_s": 0.3})
    rollout = await opened(cluster, reward=late, min_trajectories=2)
    await step(rollout)
    (row, *_) = await waiting(cluster, 3)
    await judge(cluster, {row["sample_id"]: 1.0})
    closed = await cluster.closed()
    assert (
        closed.dropped == "1 trajectories survived, rollout.min_trajectories=2" and len(closed.failures) == 2
    )
    assert (
        "NotJudged: agent solver: no reward for sample 1:q7_0_1 within agents.solver.columns.reward.timeout_s=0.3"
        in closed.failures[0].error
    )
    assert await waiting(cluster, 0) == []
    await judge(cluster, {"1:q7_0_1": 1.0})  # too late: left out, as the others of the same write count
    await judge(cluster, {"1:q7_0_1": 1.0, row["sample_id"]: 1.0})
    assert cluster.store.statistics()["late_rewards"] == 1, "each sample once, and none that had its reward"


async def test_an_evaluation_is_judged_too(cluster: FakeCluster) -> None:
    rollout = await opened(cluster)
    for reward in (1.0, 0.0):  # its samples have the same names each time
        rules = EvaluationRules(success="reward/solver")
        evaluating = asyncio.create_task(
            evaluate(rollout, [QUERY, Query("q8", "1+1")], {"solver": 0, "judge": 0}, rules)
        )
        rows = await waiting(cluster, 2)
        assert [(row["sample_id"], row["step"]) for row in rows] == [
            ("eval:q7_0_0", None),
            ("eval:q8_0_0", None),
        ]
        await judge(cluster, {"eval:q7_0_0": reward, "eval:q8_0_0": 0.5})
        found = await evaluating
        assert not found.failures
        assert found.metrics == {"reward/solver": (reward + 0.5) / 2, "accuracy": reward / 2}


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"reward": [float("nan")]}, "sample 1:q7_0_0: column reward wants a finite float, not nan"),
        ({"reward": ["1"]}, "sample 1:q7_0_0: column reward wants a finite float, not '1'"),
        ({"reward": [2 * LARGEST_REWARD]}, r"sample 1:q7_0_0: reward 2e\+12 is beyond 1e\+12"),
        ({"reward": [1.0, 2.0]}, "column reward has 2 values for 1 rows"),
        ({"reward": [1.0], "answer": ["x"]}, "rewards are written alone: sample_id and reward"),
        ({"reward": [1.0], "sample_id": ["1:q9_0_0"]}, "there is no sample '1:q9_0_0' that waits"),
        ({"reward": [1.0], "sample_id": [7]}, r"sample_id is \[7\]: a list of sample ids is wanted"),
        ({"reward": [1.0] * 2, "sample_id": ["1:q7_0_0"] * 2}, "a sample is in this write twice"),
        ({"reward": [1.0], OFFER_KEY: []}, r"@offer is \[\]: a list with one for each sample is wanted"),
    ],
)
async def test_an_invalid_reward_is_refused_by_name(
    cluster: FakeCluster, part: dict[str, Any], why: str
) -> None:
    rollout = await opened(cluster)
    await step(rollout, 1)
    await waiting(cluster, 1)
    with pytest.raises(StoreError, match=why):
        await cluster.store.write("judge", {"solver": {"sample_id": ["1:q7_0_0"], **part}})
    assert len(await waiting(cluster, 1)) == 1
    await judge(cluster, {"1:q7_0_0": 0.5})
    assert (await cluster.closed()).rewards[SOLVER] == [0.5]


async def test_a_second_reward_changes_nothing(cluster: FakeCluster) -> None:
    rollout = await opened(cluster)
    await step(rollout, 2)
    names = [row["sample_id"] for row in await waiting(cluster, 2)]
    rollout._outside._take = lambda rewards: None  # type: ignore[method-assign]  # it is slow
    await judge(cluster, {names[0]: 0.5})
    await judge(cluster, {names[0]: 0.5})
    with pytest.raises(StoreError, match="sample 1:q7_0_0 has the reward 0.5 already"):
        await judge(cluster, {names[1]: 1.0, names[0]: 0.75})
    assert [row["sample_id"] for row in await waiting(cluster, 1)] == [names[1]], "all or none"


async def test_a_repeated_reward_is_acknowledged_when_the_first_is_durable(cluster: FakeCluster) -> None:
    rollout = await opened(cluster)
    await step(rollout, 1)
    (name,) = [row["sample_id"] for row in await waiting(cluster, 1)]
    first = asyncio.ensure_future(judge(cluster, {name: 0.5}))
    await asyncio.sleep(0)
    assert cluster.store._journal._waiting, "it is being written"
    await judge(cluster, {name: 0.5})
    assert not cluster.store._journal._waiting
    await first


async def test_acknowledged_rewards_survive_the_stores_end(cluster: FakeCluster, system: ActorSystem) -> None:
    rollout = await opened(cluster)
    await step(rollout, 2)
    names = [row["sample_id"] for row in await waiting(cluster, 2)]
    rollout._outside._take = lambda rewards: None  # type: ignore[method-assign]  # it comes too late
    await judge(cluster, {names[0]: 0.5})
    del rollout._outside._take
    setup = cluster.store._setup
    await system.remove("store")
    cluster.store = Store(setup)
    await system.add(cluster.store, "store")
    await rollout._outside._offer([sample for sample, _ in rollout._outside._waiting.values()])
    # The first task ended with the store, in good order.
    rollout.background(rollout._outside.run(), "outside rewards again")
    assert [row["sample_id"] for row in await waiting(cluster, 1)] == [names[1]]
    await judge(cluster, {names[1]: 1.0})
    assert (await cluster.closed()).rewards[SOLVER] == [0.5, 1.0]


async def test_a_lost_workers_samples_wait_no_longer(cluster: FakeCluster) -> None:
    rollout = await opened(cluster)
    await step(rollout, 2)
    names = [row["sample_id"] for row in await waiting(cluster, 2)]
    await judge(cluster, {names[0]: 0.5})
    await cluster.store.retire(rollout.writer)
    assert await waiting(cluster, 0) == []
    again = UnjudgedSample(names[0], "solver", 0, 0, {})
    await cluster.store.offer("another", [again])
    assert len(await waiting(cluster, 1)) == 1, "the reward was for another answer"


async def test_a_reward_for_an_answer_that_is_gone_is_not_that_of_its_successor(cluster: FakeCluster) -> None:
    rollout = await opened(cluster)
    await step(rollout, 1)
    (name,) = [row["sample_id"] for row in await waiting(cluster, 1)]
    read = await cluster.store.unjudged(SOLVER, ["text"])
    await cluster.store.retire(rollout.writer)
    await cluster.store.offer("another", [UnjudgedSample(name, "solver", 0, 0, {"text": "y"})])
    late = {"sample_id": [name], OFFER_KEY: read[OFFER_KEY], "reward": [0.25]}
    await cluster.store.write("judge", {"solver": late})
    present = await cluster.store.unjudged(SOLVER, ["text"])
    assert present["text"] == ["y"], "it still waits"
    assert cluster.store.statistics()["late_rewards"] == 1
    await cluster.store.write("judge", {"solver": {**late, OFFER_KEY: present[OFFER_KEY], "reward": [0.75]}})
    assert await anext(cluster.store.outside_rewards("another")) == {name: 0.75}


async def test_a_worker_that_was_given_up_withdraws_its_own_samples_alone(cluster: FakeCluster) -> None:
    """It may be continued after its groups began again: then its trajectories have waited for too long."""
    rollout = await opened(cluster)
    await step(rollout, 2)
    names = [row["sample_id"] for row in await waiting(cluster, 2)]
    await cluster.store.retire(rollout.writer)
    await cluster.store.offer("another", [UnjudgedSample(name, "solver", 0, 0, {}) for name in names])
    await judge(cluster, {names[0]: 0.5})
    await cluster.store.withdraw(rollout.writer, names)
    assert [row["sample_id"] for row in await waiting(cluster, 1)] == [names[1]]
    await judge(cluster, {names[1]: 1.0})
    assert await anext(cluster.store.outside_rewards("another")) == dict(zip(names, (0.5, 1.0), strict=True))


async def test_a_column_of_the_workflow_may_be_named_offer(cluster: FakeCluster) -> None:
    cluster.columns = {"solver": {"reward": REWARD, "offer": Column(type="int")}}
    rollout = await cluster.open('    (await agents["solver"].generate(query.text)).write(offer=7)\n')
    for policy in ("solver", "judge"):
        await serve(rollout, policy, 0)
    await step(rollout, 1)
    await waiting(cluster, 1)
    shown = await cluster.store.unjudged(SOLVER, ["offer"])
    assert shown["offer"] == [7] and len(shown[OFFER_KEY]) == 1
    part = {name: shown[name] for name in ("sample_id", OFFER_KEY)}
    await cluster.store.write("judge", {"solver": {**part, "reward": [0.5]}})
    assert (await cluster.closed()).rewards[SOLVER] == [0.5]


async def test_what_is_not_there_is_not_shown_but_named(cluster: FakeCluster) -> None:
    await opened(cluster)
    assert await cluster.store.unjudged(SOLVER, ["text"]) == {"sample_id": [], OFFER_KEY: [], "text": []}
    with pytest.raises(StoreError, match="unknown column 'txt'; there are: text, query_text, .*answer, plan"):
        await cluster.store.unjudged(SOLVER, ["txt"])
    with pytest.raises(StoreError, match="the rewards of agent 'judge' are the workflow's.*columns.reward="):
        await cluster.store.unjudged(AgentName("judge"), [])


async def test_a_trajectory_is_shown_while_it_waits(cluster: FakeCluster) -> None:
    rollout = await opened(cluster)
    await step(rollout, 2)
    await waiting(cluster, 2)
    (row,) = (await cluster.store.trajectory("1:q7_1")).rows
    assert (row["sample_id"], row["status"], row["reward"]) == ("1:q7_0_1", "writing", None)


async def test_the_judges_reward_takes_the_place_of_the_workflows(cluster: FakeCluster) -> None:
    body = ALONE + '    return Rewards(solver=7.0, metrics={"length": 2.0}).of(turn, 5.0).of_team(0.25)\n'
    cluster.credit["solver"] = CreditConfig(name="dr_grpo", rewards="both")
    rollout = await opened(cluster, body)
    await step(rollout, 1)
    await waiting(cluster, 1)
    await judge(cluster, {"1:q7_0_0": 0.5})
    closed = await cluster.closed()
    assert [sample.reward for sample in await cluster.rows("solver", 0, 1)] == [0.75]
    assert (closed.rewards[SOLVER], closed.turn_rewards, closed.metrics) == (
        [0.25],
        {SOLVER: [0.5]},
        {"length": [2.0]},
    )


@pytest.mark.parametrize("used", ["turn", "both", "trajectory"])
async def test_the_answer_to_a_submitted_query_has_the_judges_rewards(
    cluster: FakeCluster, used: Any
) -> None:
    """With the rewards of turns alone an agent has no reward of its trajectory."""
    cluster.credit["solver"] = CreditConfig(name="dr_grpo", rewards=used)
    rollout = await opened(cluster)
    await start_step(rollout, 1, [QUERY], 1, {"solver": 0, "judge": 0}, submitted=["q7"])
    (row,) = await waiting(cluster, 1)
    await judge(cluster, {row["sample_id"]: 0.5})
    (trajectory,) = (await cluster.closed()).trajectories
    (turn,) = trajectory.turns
    assert (trajectory.rewards, turn.reward, turn.agent) == ({SOLVER: 0.5}, 0.5, SOLVER)
    assert (turn.sample_id, turn.text) == ("1:q7_0_0", row["answer"])


async def test_under_strict_what_has_no_reward_in_time_is_late_and_no_failure(cluster: FakeCluster) -> None:
    rollout = await opened(cluster, late_rewards_after_s=0.3)
    await step(rollout, 2)
    (row, _) = await waiting(cluster, 2)
    await judge(cluster, {row["sample_id"]: 1.0})
    closed = await cluster.closed()
    assert (closed.failures, closed.figures["late_trajectories"], closed.samples[SOLVER]) == ([], 1, 1)
    await start_step(rollout, 2, [QUERY], 2, {"solver": 0, "judge": 0})
    closed = await cluster.closed()
    assert closed.dropped == "0 trajectories survived, rollout.min_trajectories=1; 2 had no reward in time"
    with pytest.raises(
        NotJudged, match=r"no reward for sample x within rollout.late_rewards_after_s=0.3: it"
    ):
        raise NotJudged("solver", "x", rollout._outside.limit)


async def test_under_async_a_submitted_query_holds_no_step_and_a_drawn_one_does_unless_a_grace_is_set(
    cluster: FakeCluster,
) -> None:
    cluster.steps_wait = False
    rollout = await opened(cluster, reward=REWARD.model_copy(update={"timeout_s": 0.3}))
    queries = [QUERY, Query("asked", QUERY.text, QUERY.data)]
    await start_step(rollout, 1, queries, 2, {"solver": 0, "judge": 0}, submitted=["asked"])
    ends = {closed.query: closed for closed in [await cluster.closed(), await cluster.closed()]}
    assert cluster.events.waiting == ["asked"]
    assert (len(ends["asked"].failures), ends["asked"].figures["late_trajectories"]) == (0, 2)
    assert (len(ends[QUERY.id].failures), ends[QUERY.id].figures["late_trajectories"]) == (2, 0)


async def test_with_a_grace_a_drawn_query_lets_its_step_go(cluster: FakeCluster) -> None:
    cluster.steps_wait = False
    rollout = await opened(cluster, reward_grace_s=0.01)
    await step(rollout, 2)
    async with asyncio.timeout(PATIENCE_S):
        while not cluster.events.waiting:
            await asyncio.sleep(0.01)
    assert cluster.events.waiting == [QUERY.id]
