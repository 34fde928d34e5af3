"""The trajectories that become a group: stragglers, more started than wanted, zero-advantage groups, turns that new
weights interrupt. The rollout actor with a real store."""

import asyncio
from collections.abc import Callable

import pytest

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import WrongVersion
from flexmarl.actors.messages import (
    GenerateRequest,
    Generation,
    GroupClosed,
    Loaded,
    Published,
    Query,
    TableStatistics,
    TextTo,
)
from flexmarl.actors.names import Version
from flexmarl.actors.rollout.rollout import Rollout
from flexmarl.actors.rollout.rollout_config import SamplingConfig
from flexmarl.core.actor import endpoint

from ....patience import PATIENCE_S
from ..fake_cluster import JUDGE, SOLVER, FakeCluster, FakeInstance, evaluate, serve, start_step

ALONE = "turn = await agents['solver'].generate('x'); return Rewards(solver=float(turn.text == 'x'))"
QUERY = Query("q", "2+2")


class Hanging(FakeInstance):
    """Answers the turns that ``hangs`` picks only when let go; ``cancelled``: those whose callers have given up."""

    def __init__(self, hangs: Callable[[GenerateRequest], bool]) -> None:
        super().__init__(lambda request: (65,) * (1 + request.seed % 2))
        self.hangs = hangs
        self.cancelled: list[str] = []
        self.let_go = asyncio.Event()

    @endpoint
    async def generate(self, request: GenerateRequest, text_to: TextTo | None = None) -> Generation:
        if self.hangs(request):
            self.asked.append(request)
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.cancelled.append(request.sample_id)
                raise
        return await super().generate(request)


def of_trajectories(*numbers: int) -> Callable[[GenerateRequest], bool]:
    return lambda request: int(request.sample_id.rpartition("_")[2]) in numbers


async def group_of(cluster: FakeCluster, rollout: Rollout, trajectories: int, step: int = 1) -> GroupClosed:
    await serve(rollout, "solver", 0)
    await start_step(rollout, step, [QUERY], trajectories, {"solver": 0, "judge": 0})
    return await cluster.closed()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


def use(cluster: FakeCluster, instance: FakeInstance) -> None:
    cluster.instances["solver"] = [instance]


async def test_a_workflow_that_hangs_is_replaced_and_its_turn_given_up_at_the_instance(
    cluster: FakeCluster,
) -> None:
    use(cluster, hanging := Hanging(of_trajectories(1)))
    rollout = await cluster.open(ALONE, trajectory_timeout_s=0.3, on_timeout="replace")
    group = await group_of(cluster, rollout, 3)
    assert group.samples[SOLVER] == 3 and group.figures["replaced_trajectories"] == 1 and not group.dropped
    (failed,) = group.failures
    assert failed.trajectory == "1:q_1"
    assert failed.error == "not done within rollout.trajectory_timeout_s=0.3"
    assert "in workflow" in failed.remote_traceback, "it says where the workflow hung"
    rows = await cluster.rows("solver", 0, 3)
    assert {row.sample_id for row in rows} == {"1:q_0_0", "1:q_0_2", "1:q_0_3"}
    await until(lambda: hanging.cancelled == ["1:q_0_1"])


async def test_refills_have_an_end(cluster: FakeCluster) -> None:
    use(cluster, Hanging(lambda request: True))
    rollout = await cluster.open(ALONE, trajectory_timeout_s=0.05, on_timeout="replace", max_replacements=3)
    group = await group_of(cluster, rollout, 2)
    assert group.figures["replaced_trajectories"] == 3 and len(group.failures) == 5
    assert group.dropped == "0 trajectories survived, rollout.min_trajectories=1"
    assert group.samples == {"solver": 0, "judge": 0}


STUBBORN = """
    turn = await agents["solver"].generate("x")
    workflow.calls += 1
    if workflow.calls == 1:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()
    return Rewards(solver=1.0)
workflow.calls = 0
"""


async def test_a_workflow_that_takes_no_notice_of_its_end_holds_nobody_up(cluster: FakeCluster) -> None:
    rollout = await cluster.open(STUBBORN, trajectory_timeout_s=0.2)
    group = await group_of(cluster, rollout, 3)
    assert group.samples[SOLVER] == 2 and len(group.failures) == 1
    assert "in workflow" in group.failures[0].remote_traceback


async def test_an_agents_turn_has_its_own_deadline_and_policy(cluster: FakeCluster) -> None:
    use(cluster, hanging := Hanging(of_trajectories(0)))
    cluster.sampling["solver"] = SamplingConfig(turn_timeout_s=0.2, on_timeout="replace")
    rollout = await cluster.open(ALONE)
    group = await group_of(cluster, rollout, 2)
    assert group.samples[SOLVER] == 2 and group.figures["replaced_trajectories"] == 1
    assert group.failures[0].error.startswith("CallTimeout: ")
    assert hanging.cancelled == ["1:q_0_0"]


CATCHES = """
    try:
        await agents["solver"].generate("x")
    except Exception:
        await agents["solver"].generate("again")
    return Rewards(solver=1.0)
"""


async def test_a_workflow_may_bear_with_a_turn_that_overran(cluster: FakeCluster) -> None:
    use(cluster, Hanging(lambda request: request.sample_id == "1:q_0_0"))
    cluster.sampling["solver"] = SamplingConfig(turn_timeout_s=0.2, on_timeout="replace")
    group = await group_of(cluster, await cluster.open(CATCHES), 2)
    assert group.samples[SOLVER] == 2 and group.figures["replaced_trajectories"] == 0 and not group.failures


async def test_a_group_is_the_first_to_end_and_the_rest_is_stopped(cluster: FakeCluster) -> None:
    use(cluster, hanging := Hanging(of_trajectories(0, 3)))
    rollout = await cluster.open(ALONE, extra_trajectories=2)
    group = await group_of(cluster, rollout, 3)
    assert (
        group.samples[SOLVER] == 3 and group.figures["oversampled_trajectories"] == 2 and not group.failures
    )
    rows = await cluster.rows("solver", 0, 3)
    assert [row.sample_id for row in rows] == ["1:q_0_1", "1:q_0_2", "1:q_0_4"]
    assert {row.group_size for row in rows} == {len(group.rewards[SOLVER])} == {3}
    await until(lambda: sorted(hanging.cancelled) == ["1:q_0_0", "1:q_0_3"])


FIRST_FAILS = """
    await agents["solver"].generate("x")
    workflow.calls += 1
    return Rewards(solver=1 / (workflow.calls - 1))
workflow.calls = 0
"""


async def test_a_failure_is_made_up_for_by_what_was_started_beyond(cluster: FakeCluster) -> None:
    rollout = await cluster.open(FIRST_FAILS, extra_trajectories=1)
    group = await group_of(cluster, rollout, 3)
    assert (
        group.samples[SOLVER] == 3
        and len(group.failures) == 1
        and group.figures["oversampled_trajectories"] == 0
    )


ENDS = f"{ALONE.replace('return', 'workflow.ended += 1; return')}\nworkflow.ended = 0"


async def test_a_surplus_that_is_kept_runs_to_its_end_and_is_not_used(cluster: FakeCluster) -> None:
    use(cluster, hanging := Hanging(of_trajectories(0)))
    rollout = await cluster.open(ENDS, extra_trajectories=1, oversampled="keep")
    group = await group_of(cluster, rollout, 2)
    assert group.samples[SOLVER] == 2 and group.figures["oversampled_trajectories"] == 1
    hanging.let_go.set()
    workflow = rollout._recipe.workflow
    await until(lambda: workflow.ended == 3)  # type: ignore[attr-defined]  # the test's own
    assert hanging.cancelled == []
    assert await cluster.statistics("solver") == TableStatistics(ready=2, leased=0, consumed=0)


async def test_too_few_survivors_are_no_group(cluster: FakeCluster) -> None:
    use(cluster, hanging := Hanging(of_trajectories(2)))
    rollout = await cluster.open(FIRST_FAILS, min_trajectories=3)
    group = await group_of(cluster, rollout, 3)
    assert group.dropped == "0 trajectories survived, rollout.min_trajectories=3"
    assert group.samples[SOLVER] == 0 and await cluster.statistics("solver") == TableStatistics(0, 0, 0)
    await until(lambda: hanging.cancelled == ["1:q_0_2"])


EQUAL_FOR_THE_JUDGE = """
    draft = await agents["solver"].generate(query.text)
    await agents["judge"].generate("?")
    workflow.calls += 1
    return Rewards(solver=float(workflow.calls), judge=0.25)
workflow.calls = 0
"""


async def test_samples_that_teach_their_agent_nothing_are_left_out(cluster: FakeCluster) -> None:
    rollout = await cluster.open(EQUAL_FOR_THE_JUDGE, filters=["equal_rewards"], replacement_queries=1)
    await serve(rollout, "judge", 0)
    group = await group_of(cluster, rollout, 3)
    assert group.samples == {"solver": 3, "judge": 0}
    assert group.filtered == {"equal_rewards": {"judge": 3}} and not group.dropped
    assert group.rewards[JUDGE] == [0.25] * 3, "they count in the report"


async def test_a_group_that_teaches_nobody_anything_is_dropped(cluster: FakeCluster) -> None:
    body = "await agents['solver'].generate('x'); return Rewards(solver=1.0, judge=float(query.id == 'q'))"
    rollout = await cluster.open(body, filters=["equal_rewards"], replacement_queries=1)
    group = await group_of(cluster, rollout, 3)
    assert group.dropped == "all rewards are equal: solver"
    assert group.samples[SOLVER] == 0 and await cluster.statistics("solver") == TableStatistics(0, 0, 0)


THE_FIRST_TALKS_TWICE = """
    await agents["solver"].generate("x")
    workflow.calls += 1
    reward = workflow.calls
    if reward == 1:
        await agents["solver"].generate("y")
    await agents["judge"].generate("?")
    return Rewards(solver=float(reward), judge=float(reward))
workflow.calls = 0
"""


async def test_rewards_are_compared_agent_by_agent_when_the_group_closes(cluster: FakeCluster) -> None:
    cluster.credit["solver"] = CreditConfig(name="at_grpo", scale_rewards=False)
    rollout = await cluster.open(THE_FIRST_TALKS_TWICE)
    await serve(rollout, "judge", 0)
    group = await group_of(cluster, rollout, 3)
    assert group.samples == {"solver": 4, "judge": 3}
    solver = {(row.reward, row.advantage, row.group_size) for row in await cluster.rows("solver", 0, 4)}
    everyone = {(1.0, -1.0, 3), (2.0, 0.0, 3), (3.0, 1.0, 3)}
    assert solver == everyone | {(1.0, 0.0, 1)}
    judge = {(row.reward, row.advantage, row.group_size) for row in await cluster.rows("judge", 0, 3)}
    assert judge == everyone, "its trajectories, as ever"


async def test_length_costs_reward_before_groups_are_compared_and_not_in_an_evaluation(
    cluster: FakeCluster,
) -> None:
    lengths = iter((2, 3, 4, 4))
    use(cluster, FakeInstance(lambda request: (65,) * next(lengths)))
    cluster.sampling["solver"] = SamplingConfig(max_new_tokens=4, overlong_buffer=2)
    body = "await agents['solver'].generate('x'); return Rewards(solver=1.0)"
    rollout = await cluster.open(body)
    group = await group_of(cluster, rollout, 3)
    assert sorted(group.rewards[SOLVER]) == [0.0, 0.5, 1.0]
    for row in await cluster.rows("solver", 0, 3):
        assert row.reward == 1.0 - (len(row.tokens) - 2) / 2
        assert (row.advantage, row.group_size) == (row.reward - 0.5, 3)
    evaluation = await evaluate(rollout, [QUERY], {"solver": 0, "judge": 0})
    assert evaluation.metrics["reward/solver"] == 1.0


async def test_a_punishment_for_length_alone_does_not_keep_a_group(cluster: FakeCluster) -> None:
    """Dynamic sampling is about right and wrong answers: here all are right, and of different lengths."""
    lengths = iter((2, 3, 4))
    use(cluster, FakeInstance(lambda request: (65,) * next(lengths)))
    cluster.sampling["solver"] = SamplingConfig(max_new_tokens=4, overlong_buffer=2)
    body = "await agents['solver'].generate('x'); return Rewards(solver=1.0)"
    rollout = await cluster.open(body, filters=["equal_rewards"], replacement_queries=1)
    group = await group_of(cluster, rollout, 3)
    assert group.dropped == "all rewards are equal: solver" and group.filtered == {
        "equal_rewards": {SOLVER: 3}
    }
    assert sorted(group.rewards[SOLVER]) == [0.0, 0.5, 1.0]


class Updating(FakeInstance):
    """Is given new weights while its second turn is under way, which then has two tokens; refuses other versions."""

    def __init__(self) -> None:
        super().__init__(lambda request: (65,))
        self.version: int | None = 4
        self.refused: list[int] = []
        self.talks, self.loads, self.loaded = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @endpoint
    async def load(self, published: Published) -> Loaded:
        if published.version == 5:
            self.version = None
            self.loads.set()
            await self.loaded.wait()
            self.version = 5
        return await super().load(published)

    @endpoint
    async def generate(self, request: GenerateRequest, text_to: TextTo | None = None) -> Generation:
        if request.versions.oldest != self.version:
            self.refused.append(request.versions.oldest)
            raise WrongVersion("solver", request.versions.oldest, self.version)
        if self.version == 4 and len(self.asked) == 1:
            self.talks.set()
            await self.loads.wait()
            return Generation("ab", (120,), (1, 2), (-0.1, -0.2), Version(4), "interrupted")
        return await super().generate(request)


TALK = """
    first = await agents["solver"].generate("x")
    await agents["solver"].generate([first, "?"])
    return Rewards(solver=1.0)
"""


async def test_turns_go_on_with_new_weights(cluster: FakeCluster) -> None:
    use(cluster, instance := Updating())
    rollout = await cluster.open(TALK, trajectory_timeout_s=5)
    await serve(rollout, "solver", 4)
    await start_step(rollout, 5, [QUERY], 2, {"solver": 3, "judge": 0}, allow_newer=True)
    await instance.talks.wait()
    asked = len(instance.asked)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(rollout, "solver", 5))
        await instance.loads.wait()
        await asyncio.sleep(4)
        assert len(instance.asked) == asked, "a resumed turn waits until the instance has the weights"
        instance.loaded.set()
    group = await cluster.closed()
    assert instance.refused == []
    assert group.samples[SOLVER] == 4 and not group.failures
    assert (group.figures["resumed_turns"], group.figures["resumed_tokens"]) == (1, 2)
    first, resumed_turns = await cluster.rows("solver", 4, 2)
    assert (first.tokens, first.version_changes) == ((65,), ())
    assert resumed_turns.tokens == (1, 2, 65) and resumed_turns.logprobs == pytest.approx((-0.1, -0.2, -0.5))
    assert resumed_turns.token_versions == (4, 4, 5), (
        "its row is of the oldest: staleness is counted from there"
    )
    assert len(await cluster.rows("solver", 5, 2)) == 2


async def test_a_turn_that_must_have_its_own_version_fails_with_it(cluster: FakeCluster) -> None:
    use(cluster, instance := Updating())
    instance.version = 5
    rollout = await cluster.open(TALK)
    await serve(rollout, "solver", 4)
    await start_step(rollout, 5, [QUERY], 2, {"solver": 4, "judge": 0})
    assert [failed.error.split(":")[0] for failed in (await cluster.closed()).failures] == [
        "WrongVersion"
    ] * 2


async def test_rewards_of_turns_keep_a_group_whose_trajectories_are_equal(cluster: FakeCluster) -> None:
    cluster.credit["solver"] = CreditConfig(name="dr_grpo", rewards="both")
    body = """
    one, two = await agents['solver'].generate('x'), await agents['solver'].generate('y')
    return Rewards(solver=1.0).of(one, 0.5)
    """
    rollout = await cluster.open(body, filters=["equal_rewards"], replacement_queries=1)
    group = await group_of(cluster, rollout, 2)
    assert group.samples[SOLVER] == 4 and group.filtered == {} and not group.dropped


async def test_overlong_turns_are_left_out_and_count_in_the_advantages_of_the_others(
    cluster: FakeCluster,
) -> None:
    lengths = iter((4, 2, 3))
    use(cluster, FakeInstance(lambda request: (65,) * next(lengths)))
    body = "turn = await agents['solver'].generate('x'); return Rewards(solver=float(len(turn.tokens)))"
    rollout = await cluster.open(body, filters=[{"name": "overlong", "tokens": 3}], replacement_queries=1)
    group = await group_of(cluster, rollout, 3)
    assert group.samples[SOLVER] == 2 and group.filtered == {"overlong": {SOLVER: 1}} and not group.dropped
    rows = await cluster.rows("solver", 0, 2)
    assert {(row.reward, row.advantage, row.group_size) for row in rows} == {(2.0, -1.0, 3), (3.0, 0.0, 3)}
    assert sorted(group.rewards[SOLVER]) == [2.0, 3.0, 4.0], "it counts in the report"


async def test_a_function_of_the_recipe_drops_groups(cluster: FakeCluster) -> None:
    body = f"{ALONE}\ndef fn(group): return f'{{group.query.text}}: {{len(group.turns)}} answers'"
    rollout = await cluster.open(body, filters=["workflow.py:fn"], replacement_queries=1)
    group = await group_of(cluster, rollout, 3)
    assert group.dropped == "2+2: 3 answers" and group.filtered == {"fn": {SOLVER: 3}}
    assert await cluster.statistics("solver") == TableStatistics(ready=0, leased=0, consumed=0)
