"""The rollout actor with a real store, and instances whose answers the test chooses."""

import asyncio
import math
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import pytest

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import RecipeError, WorkerReplaced
from flexmarl.actors.messages import GenerateRequest, Query, TableStatistics, VersionRange
from flexmarl.actors.names import Step, Version
from flexmarl.actors.orchestrator.evaluation import EvaluationRules
from flexmarl.actors.orchestrator.orchestrator_config import EvaluationConfig
from flexmarl.actors.rollout import rollout as rollout_module
from flexmarl.actors.rollout.block_watch import report_file
from flexmarl.actors.rollout.rollout_config import SamplingConfig
from flexmarl.core.errors import is_loss

from ...patience import PATIENCE_S
from .fake_cluster import QUERY, SOLVER, TWO_TURNS, FakeCluster, FakeInstance, evaluate, serve, start_step


async def test_a_group_closes_with_its_samples_in_the_store(cluster: FakeCluster) -> None:
    rollout = await cluster.open(TWO_TURNS)
    for agent in ("solver", "judge"):
        await serve(rollout, agent, 4)
    await start_step(rollout, 5, [QUERY], 6, {"solver": 4, "judge": 4})
    group = await cluster.closed()
    assert (group.step, group.query, group.samples, group.failures) == (
        5,
        "q7",
        {"solver": 6, "judge": 6},
        [],
    )
    assert group.generated_tokens == sum(group.rewards[SOLVER]) + 6
    assert group.metrics == {"accuracy": [0.5] * 6}
    assert [group.turns[agent].figures["turns"] for agent in group.samples] == [6, 6]
    assert sum(turns.figures["tokens"] for turns in group.turns.values()) == group.generated_tokens
    rows = await cluster.rows("solver", 4, 6)
    assert [row.sample_id for row in rows] == [f"5:q7_0_{trajectory}" for trajectory in range(6)]
    for row in rows:
        assert row.reward == len(row.tokens)
        mean = math.fsum(group.rewards[SOLVER]) / 6
        assert (row.advantage, row.group_size) == (row.reward - mean, 6)


async def test_the_line_that_blocks_it_is_written_where_all_hosts_see_it(cluster: FakeCluster) -> None:
    rollout = await cluster.open("return Rewards()")
    assert rollout._block_watch._report == report_file(cluster.folder, "rollout")
    assert cluster.folder != cluster.system.directory


async def test_a_turn_in_a_prompt_keeps_its_very_tokens(cluster: FakeCluster) -> None:
    rollout = await cluster.open(TWO_TURNS)
    for agent in ("solver", "judge"):
        await serve(rollout, agent, 0)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
    await cluster.closed()
    for request in cluster.instances["judge"][0].asked:
        turn, question = request.prompt
        assert isinstance(turn, tuple) and turn[:3] == tuple(map(ord, "2+2")) and set(turn[3:]) == {65}
        assert question == "?"


async def test_instances_share_the_turns(cluster: FakeCluster) -> None:
    rollout = await cluster.open(TWO_TURNS)
    for agent in ("solver", "judge"):
        await serve(rollout, agent, 0)
    await start_step(rollout, 1, [QUERY], 8, {"solver": 0, "judge": 0})
    await cluster.closed()
    assert [len(fake.asked) for fake in cluster.instances["solver"]] == [4, 4]


async def test_a_turn_waits_for_its_own_agent_alone(cluster: FakeCluster) -> None:
    rollout = await cluster.open(TWO_TURNS)
    await serve(rollout, "solver", 1)
    await serve(rollout, "judge", 0)
    await start_step(rollout, 2, [QUERY], 3, {"solver": 1, "judge": 1})
    async with asyncio.timeout(PATIENCE_S):
        while sum(len(fake.asked) for fake in cluster.instances["solver"]) < 3:
            await asyncio.sleep(0.001)
    assert cluster.instances["judge"][0].asked == []
    await serve(rollout, "judge", 1)
    assert (await cluster.closed()).samples == {"solver": 3, "judge": 3}
    assert {request.versions.oldest for request in cluster.instances["judge"][0].asked} == {1}


async def test_draws_depend_on_the_sample_alone(cluster: FakeCluster) -> None:
    rollout = await cluster.open(TWO_TURNS)
    for agent in ("solver", "judge"):
        await serve(rollout, agent, 0)
    await start_step(rollout, 1, [QUERY, Query("q8", "1+1")], 4, {"solver": 0, "judge": 0})
    await cluster.closed()
    await cluster.closed()
    asked = [request for fakes in cluster.instances.values() for fake in fakes for request in fake.asked]
    assert len({request.seed for request in asked}) == len(asked) == 16
    assert {request.sample_id for request in asked} == {
        f"1:q{q}_{t}_{n}" for q in (7, 8) for t in (0, 1) for n in range(4)
    }


FAILS_IN_ONE = """
    draft = await agents["solver"].generate(query.text)
    if workflow.calls == 2:
        {failure}
    workflow.calls += 1
    return Rewards(solver=1.0)
workflow.calls = 0

async def unused():
    pass
"""


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        ("raise KeyError('no tool')", "KeyError: 'no tool'"),
        (
            "workflow.calls += 1; return Rewards(solver=float('nan'))",
            "InvalidReward: reward of 'solver' is nan",
        ),
        ("workflow.calls += 1; return Rewards(solver='high')", "InvalidReward: reward of 'solver' is 'high'"),
        (
            "workflow.calls += 1; await asyncio.Event().wait()",
            "not done within rollout.trajectory_timeout_s=0.5",
        ),
    ],
)
async def test_a_trajectory_that_fails_is_dropped_and_its_siblings_stay(
    cluster: FakeCluster, failure: str, error: str
) -> None:
    if not failure.startswith("workflow"):
        failure = f"workflow.calls += 1; {failure}"
    rollout = await cluster.open(FAILS_IN_ONE.format(failure=failure), trajectory_timeout_s=0.5)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 4, {"solver": 0, "judge": 0})
    group = await cluster.closed()
    assert group.samples == {"solver": 3, "judge": 0}
    (failed,) = group.failures
    assert failed.error.startswith(error) and failed.trajectory.startswith("1:q7_")
    assert failed.remote_traceback.startswith('  File "') and 'workflow.py", line' in failed.remote_traceback
    assert f'"{Path(rollout_module.__file__).parent}' not in failed.remote_traceback, "no frame of flexmarl"
    assert len(group.rewards[SOLVER]) == 3
    assert await cluster.statistics("solver") == TableStatistics(ready=3, leased=0, consumed=0)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            "await agents['solvr'].generate('x')",
            r"asks for agent 'solvr', which the config lacks; it has: solver, judge; do you mean solver\? "
            r"\(workflow.py:\d+, in workflow: await agents\['solvr'\]",
        ),
        ("return Rewards(solvr=1.0)", r"rewards agent 'solvr', which the config lacks"),
        ("return Rewards(team=1.0)", r"it has: solver, judge; the reward of all is Rewards\(\).of_team"),
        (
            "await agents['judge'].generate('x'); return Rewards(solver=1.0)",
            "used agent 'judge' and returned no reward",
        ),
        ("return 1.0", "returned float, not Rewards"),
    ],
)
async def test_what_no_trajectory_can_mend_ends_the_run(cluster: FakeCluster, body: str, error: str) -> None:
    rollout = await cluster.open(body)
    for agent in ("solver", "judge"):
        await serve(rollout, agent, 0)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
    failure = await asyncio.wait_for(asyncio.shield(cluster.system.failure), PATIENCE_S)
    assert isinstance(failure, RecipeError)
    with pytest.raises(RecipeError, match=error):
        raise failure


async def test_an_evaluation_is_greedy_and_outside_the_store(cluster: FakeCluster) -> None:
    rollout = await cluster.open(TWO_TURNS)
    for agent in ("solver", "judge"):
        await serve(rollout, agent, 0)
    queries = [Query(f"e{n}", "2+2") for n in range(5)]
    result = await evaluate(rollout, queries, {"solver": 0, "judge": 0})
    assert result.trajectories == 5 and result.failures == []
    assert result.metrics["accuracy"] == 0.5 and result.metrics["reward/judge"] == 1.0
    assert {r.temperature for fakes in cluster.instances.values() for fake in fakes for r in fake.asked} == {
        0.0
    }
    assert await cluster.statistics("solver") == TableStatistics(ready=0, leased=0, consumed=0)


async def test_what_the_instance_refuses_reaches_the_workflow(cluster: FakeCluster) -> None:
    def refuse(request: GenerateRequest) -> tuple[int, ...]:
        raise ValueError("prompt of 99 tokens")

    cluster.instances["solver"] = [FakeInstance(refuse)]
    rollout = await cluster.open("await agents['solver'].generate('x'); return Rewards(solver=1.0)")
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
    group = await cluster.closed()
    assert [f.error for f in group.failures] == ["ValueError: prompt of 99 tokens"] * 2
    assert "prompt of 99 tokens" in group.failures[0].remote_traceback
    assert group.samples == {"solver": 0, "judge": 0}


async def test_waiting_for_a_version_does_not_count_against_the_trajectory(cluster: FakeCluster) -> None:
    rollout = await cluster.open(TWO_TURNS, trajectory_timeout_s=0.2)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 3, {"solver": 0, "judge": 0})
    await asyncio.sleep(0.5)  # longer than a trajectory may take
    await serve(rollout, "judge", 0)
    group = await cluster.closed()
    assert group.failures == [] and group.samples == {"solver": 3, "judge": 3}


async def test_the_time_after_the_wait_counts(cluster: FakeCluster) -> None:
    body = "await agents['judge'].generate('x'); await asyncio.Event().wait()"
    rollout = await cluster.open(body, trajectory_timeout_s=0.2)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
    await serve(rollout, "judge", 0)
    group = await cluster.closed()
    assert [f.error for f in group.failures] == ["not done within rollout.trajectory_timeout_s=0.2"] * 2


LATE = """
    late = asyncio.ensure_future(agents["judge"].generate("late"))
    await agents["solver"].generate("x")
    return Rewards(solver=1.0)
"""


async def test_a_turn_that_ends_after_its_workflow_is_no_part_of_it(cluster: FakeCluster) -> None:
    rollout = await cluster.open(LATE)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
    assert (await cluster.closed()).samples == {"solver": 2, "judge": 0}
    await serve(rollout, "judge", 0)
    async with asyncio.timeout(PATIENCE_S):
        while len(cluster.instances["judge"][0].asked) < 2:
            await asyncio.sleep(0.001)
    assert await cluster.statistics("judge") == TableStatistics(ready=0, leased=0, consumed=0)


async def test_a_query_that_comes_again_makes_new_samples(cluster: FakeCluster) -> None:
    rollout = await cluster.open("await agents['solver'].generate('x'); return Rewards(solver=1.0)")
    await serve(rollout, "solver", 0)
    for step in (1, 2):
        await start_step(rollout, step, [QUERY], 2, {"solver": 0, "judge": 0})
        await cluster.closed()
    assert (await cluster.statistics("solver")).ready == 4
    assert len({request.seed for fake in cluster.instances["solver"] for request in fake.asked}) == 4


async def test_two_queries_of_one_step_with_one_id_are_refused(cluster: FakeCluster) -> None:
    rollout = await cluster.open(TWO_TURNS)
    with pytest.raises(RecipeError, match="step 1 has two queries with the id 'q7'"):
        await start_step(rollout, 1, [QUERY, QUERY], 2, {"solver": 0, "judge": 0})


async def test_a_turn_of_another_tokenizer_is_refused(cluster: FakeCluster) -> None:
    cluster.tokenizers["judge"] = "another"
    rollout = await cluster.open(TWO_TURNS)
    for agent in ("solver", "judge"):
        await serve(rollout, agent, 0)
    with pytest.raises(
        RecipeError, match="a turn of 'solver' into a prompt of 'judge', whose tokenizer is another"
    ):
        await evaluate(rollout, [QUERY], {"solver": 0, "judge": 0})


async def test_each_sampling_runs_at_its_temperature_as_often_as_it_repeats(cluster: FakeCluster) -> None:
    samplings = {"sampled": {"temperature": 0.7, "repeats": 3}, "own": {"temperature": None, "repeats": 2}}
    rules = EvaluationRules(EvaluationConfig.model_validate({"samplings": samplings}).all_samplings())
    cluster.sampling["solver"] = SamplingConfig(temperature=1.5)
    rollout = await cluster.open(TWO_TURNS)
    for agent in ("solver", "judge"):
        await serve(rollout, agent, 0)
    queries = [Query(f"e{n}", "2+2") for n in range(2)]
    result = await evaluate(rollout, queries, {"solver": 0, "judge": 0}, rules)
    assert result.trajectories == 12 and result.failures == []
    assert {name for name in result.metrics if name.endswith("accuracy")} == {
        "accuracy",
        "sampled/accuracy",
        "own/accuracy",
    }
    asked = {agent: [r for fake in fakes for r in fake.asked] for agent, fakes in cluster.instances.items()}
    for agent, own in (("solver", 1.5), ("judge", 1.0)):
        assert sorted(r.temperature for r in asked[agent]) == sorted([0.0] * 2 + [0.7] * 6 + [own] * 4)
    everything = [r for requests in asked.values() for r in requests]
    assert len({r.sample_id for r in everything}) == len({r.seed for r in everything}) == len(everything)


async def test_work_for_another_life_of_the_worker_is_refused(cluster: FakeCluster) -> None:
    rollout = await cluster.open(TWO_TURNS)
    async with aclosing(rollout.ref.within(PATIENCE_S).enlist()) as lives:
        life = await anext(lives)
    assert life.writer == rollout.writer and life.incarnation == cluster.system.incarnation
    for writer in ("rollout", f"{rollout.writer}x"):
        with pytest.raises(WorkerReplaced, match=f"not {writer}, which has ended"):
            await rollout.ref.api.start_step(writer, Step(1), [(0, QUERY)], 2, {})
        with pytest.raises(WorkerReplaced):
            await rollout.ref.api.evaluate(writer, Step(0), [], {})
    assert await rollout.ref.api.evaluate(life.writer, Step(0), [], {}) == []


async def test_the_report_of_a_group_is_in_the_store_with_its_samples(cluster: FakeCluster) -> None:
    rollout = await cluster.open(TWO_TURNS)
    for agent in ("solver", "judge"):
        await serve(rollout, agent, 0)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
    closed = await cluster.closed()
    assert await cluster.store.retire(rollout.writer) == [closed]


async def test_a_worker_that_the_store_has_retired_is_lost_and_closes_no_group(cluster: FakeCluster) -> None:
    rollout = await cluster.open(TWO_TURNS)
    await cluster.store.retire(rollout.writer)
    for agent in ("solver", "judge"):
        await serve(rollout, agent, 0)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
    failure = await asyncio.wait_for(asyncio.shield(cluster.system.failure), PATIENCE_S)
    assert is_loss(failure) and "is retired" in str(failure)
    assert cluster.events.closed.empty() and (await cluster.statistics("solver")).ready == 0


class TestTwoAgentsOfOnePolicy:
    """The solver and the judge use the policy ``shared``."""

    @pytest.fixture
    def shared(self, cluster: FakeCluster) -> FakeCluster:
        cluster.policies = {"solver": "shared", "judge": "shared"}
        cluster.tokenizers = {"shared": "one"}
        cluster.sampling["judge"] = SamplingConfig(temperature=0.5, max_new_tokens=7)
        cluster.instances = {"shared": [FakeInstance(lambda request: (65,)) for _ in range(2)]}
        return cluster

    async def test_their_turns_go_to_its_instances_each_with_its_agents_sampling(
        self, shared: FakeCluster
    ) -> None:
        rollout = await shared.open(TWO_TURNS)
        await serve(rollout, "shared", 3)
        await start_step(rollout, 5, [QUERY], 4, {"shared": 3})
        assert (await shared.closed()).samples == {"solver": 4, "judge": 4}
        asked = [fake.asked for fake in shared.instances["shared"]]
        assert [len(requests) for requests in asked] == [4, 4], "the load is the policy's, not an agent's"
        by_agent = Counter(
            (request.sample_id.split("_")[1], request.temperature, request.max_new_tokens)
            for requests in asked
            for request in requests
        )
        assert by_agent == {("0", 1.0, 64): 4, ("1", 0.5, 7): 4}
        rows = await shared.rows("shared", 3, 8)
        assert len(rows) == 8 and {(row.agent, row.policy_version, row.temperature) for row in rows} == {
            ("solver", 3, 1.0), ("judge", 3, 0.5),
        }  # fmt: skip

    async def test_they_wait_for_its_version(self, shared: FakeCluster) -> None:
        rollout = await shared.open(TWO_TURNS)
        await serve(rollout, "shared", 0)
        await start_step(rollout, 1, [QUERY], 2, {"shared": 1})
        await asyncio.sleep(0)
        assert not any(fake.asked for fake in shared.instances["shared"])
        await serve(rollout, "shared", 1)
        assert (await shared.closed()).samples == {"solver": 2, "judge": 2}
        asked = [request for fake in shared.instances["shared"] for request in fake.asked]
        assert {request.versions for request in asked} == {VersionRange.exactly(Version(1))}


DRAFTS = """
    drafts = await asyncio.gather(*(agents["solver"].generate(query.text) for _ in range(3)))
    rewards = Rewards()
    for draft in drafts:
        rewards.of(draft, float(draft.sample_id.split("_")[-2]))
    {after}
    return rewards.of_team(10.0)
"""


async def test_parallel_drafts_have_rewards_of_their_own(cluster: FakeCluster) -> None:
    cluster.credit["solver"] = CreditConfig(name="dr_grpo", rewards="both")
    rollout = await cluster.open(DRAFTS.format(after=""))
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
    group = await cluster.closed()
    assert group.failures == [] and group.rewards[SOLVER] == [10.0, 10.0]
    assert sorted(group.turn_rewards[SOLVER]) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    rows = await cluster.rows("solver", 0, 6)
    assert {row.sample_id: row.reward for row in rows} == {
        f"1:q7_{turn}_{trajectory}": 10.0 + turn for turn in range(3) for trajectory in range(2)
    }
    assert {(row.advantage, row.group_size) for row in rows} == {(-1.0, 6), (0.0, 6), (1.0, 6)}
    evaluation = await evaluate(rollout, [QUERY], {"solver": 0, "judge": 0})
    assert (evaluation.metrics["reward/solver"], evaluation.metrics["turn_reward/solver"]) == (10.0, 1.0)


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ("rewards.of(drafts[1], float('nan'))", "reward of turn 1:q7_1_0 of 'solver' is nan"),
        ("rewards.of(workflow.kept, 1.0)", "agent 'solver': turn 1:q7_0_1 has the reward 1, and is not of"),
    ],
)
async def test_an_invalid_reward_of_a_turn_fails_its_trajectory_and_the_others_continue(
    cluster: FakeCluster, reward: str, problem: str
) -> None:
    cluster.credit["solver"] = CreditConfig(name="dr_grpo", rewards="both")
    after = f"""
    if drafts[0].sample_id.endswith("_1"):
        workflow.kept = drafts[0]
    else:
        while not hasattr(workflow, "kept"):
            await asyncio.sleep(0)
        {reward}
    """
    rollout = await cluster.open(DRAFTS.format(after=after))
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
    group = await cluster.closed()
    (failure,) = group.failures
    assert failure.trajectory == "1:q7_0" and problem in failure.error
    assert group.samples[SOLVER] == 3 and group.rewards[SOLVER] == [10.0]
