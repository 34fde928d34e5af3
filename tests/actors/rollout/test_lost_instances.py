"""Instances that are lost, broken or leave while they generate turns: what becomes of the turns."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from flexmarl.actors.errors import EngineFailed, NoInstance, NonFiniteLogits, PromptTooLong, WrongVersion
from flexmarl.actors.inference.router.router_config import RouterConfig
from flexmarl.actors.messages import GenerateRequest, Generation, TextTo
from flexmarl.actors.names import PolicyName
from flexmarl.actors.run_events import InstanceChanged
from flexmarl.core.actor import endpoint
from flexmarl.core.errors import ActorDead, is_loss

from .fake_cluster import QUERY, SOLVER, FakeCluster, FakeInstance, serve, start_step

ONE_TURN = (
    'turn = await agents["solver"].generate(query.text); return Rewards(solver=float(len(turn.tokens)))'
)
ABOVE_ALL = 64


class Slow(FakeInstance):
    """Takes ten seconds for a turn."""

    @endpoint
    async def generate(self, request: GenerateRequest, text_to: TextTo | None = None) -> Generation:
        generation = await super().generate(request)
        await asyncio.sleep(10)
        return generation


def one_token(request: GenerateRequest) -> tuple[int, ...]:
    return (65,)


def news(cluster: FakeCluster) -> list[tuple[str, str]]:
    seen = [event for event in cluster.events.seen if isinstance(event, InstanceChanged)]
    return [(event.instance, event.state) for event in seen]


async def add_again(cluster: FakeCluster, name: str, fake: FakeInstance) -> None:
    """As its supervisor would start it."""
    cluster.instances["solver"].append(fake)
    reference = await cluster.system.add(fake, name)
    await cluster.router.ref.api.join(reference, (PolicyName("solver"),), ABOVE_ALL)


async def test_the_turns_of_one_that_dies_are_begun_again_elsewhere_and_counted(cluster: FakeCluster) -> None:
    cluster.instances["solver"] = [Slow(one_token), Slow(one_token)]
    rollout = await cluster.open(ONE_TURN)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 8, {"solver": 0, "judge": 0})
    await asyncio.sleep(5)
    await cluster.system.remove("solver-0")
    group = await cluster.closed()
    assert group.samples[SOLVER] == 8 and group.failures == []
    assert group.figures["retried_turns"] == 4
    asked = [request.sample_id for request in cluster.instances["solver"][1].asked]
    assert len(asked) == len(set(asked)) == 8
    assert ("solver-0", "gone") in news(cluster)


async def test_one_that_is_started_again_gets_the_turns_when_it_has_loaded(cluster: FakeCluster) -> None:
    cluster.instances["solver"] = [Slow(one_token)]
    rollout = await cluster.open(ONE_TURN, trajectory_timeout_s=30.0)
    await serve(rollout, "solver", 3)
    await start_step(rollout, 1, [QUERY], 4, {"solver": 3, "judge": 0})
    await asyncio.sleep(5)
    await cluster.system.remove("solver-0")
    await asyncio.sleep(600)
    await add_again(cluster, "solver-0", FakeInstance(one_token))
    group = await cluster.closed()
    assert group.samples[SOLVER] == 4 and group.figures["retried_turns"] == 4, (
        "the wait was not the trajectories' time"
    )
    assert news(cluster)[-1] == ("solver-0", "serving")


async def test_a_turn_is_not_begun_again_for_ever(cluster: FakeCluster) -> None:
    cluster.instances["solver"] = [Slow(one_token)]
    rollout = await cluster.open(ONE_TURN, turn_retries=2)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 1, {"solver": 0, "judge": 0})
    for _ in range(3):
        await asyncio.sleep(5)
        await cluster.system.remove("solver-0")
        await add_again(cluster, "solver-0", Slow(one_token))
    group = await cluster.closed()
    assert [failed.error.split(":")[0] for failed in group.failures] == ["ActorDead"]
    assert group.figures["retried_turns"] == 2 and group.samples[SOLVER] == 0


def raising(error: Exception) -> Callable[[GenerateRequest], tuple[int, ...]]:
    def answer(request: GenerateRequest) -> tuple[int, ...]:
        raise error

    return answer


async def test_a_broken_engine_costs_a_retry(cluster: FakeCluster) -> None:
    cluster.instances["solver"] = [
        FakeInstance(raising(EngineFailed("CUDA error: an illegal memory access"))),
        FakeInstance(one_token),
    ]
    rollout = await cluster.open(ONE_TURN)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 4, {"solver": 0, "judge": 0})
    group = await cluster.closed()
    assert group.samples[SOLVER] == 4 and group.failures == []
    assert group.figures["retried_turns"] == 2
    assert ("solver-0", "suspected") in news(cluster)


@pytest.mark.parametrize("error", [PromptTooLong("r", 9000, 64, 8192), NonFiniteLogits(("r",))])
async def test_what_another_instance_would_refuse_too_fails_the_trajectory(
    cluster: FakeCluster, error: Exception
) -> None:
    cluster.instances["solver"] = [FakeInstance(raising(error)), FakeInstance(raising(error))]
    rollout = await cluster.open(ONE_TURN)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
    group = await cluster.closed()
    assert [failed.error for failed in group.failures] == [f"{type(error).__name__}: {error}"] * 2
    assert group.figures["retried_turns"] == 0 and news(cluster) == []


class Idle(FakeInstance):
    """Interrupts every turn at once, and serves the same version."""

    def __init__(self) -> None:
        super().__init__(lambda request: ())

    @endpoint
    async def generate(self, request: GenerateRequest, text_to: TextTo | None = None) -> Generation:
        assert len(self.asked) < 100, "a turn is asked for without an end"
        return replace(await super().generate(request), finish_reason="interrupted")


async def test_a_turn_that_is_interrupted_without_a_token_is_not_asked_for_for_ever(
    cluster: FakeCluster,
) -> None:
    cluster.instances["solver"] = [Idle()]
    rollout = await cluster.open(ONE_TURN, turn_retries=2)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 1, {"solver": 0, "judge": 0}, allow_newer=True)
    group = await cluster.closed()
    assert [failed.error for failed in group.failures] == [
        "EngineFailed: the engine has failed: solver-0 interrupts turn 1:q7_0_0 again and again without a token, "
        "and serves no later version"
    ]
    assert group.figures["retried_turns"] == 2 and len(cluster.instances["solver"][0].asked) == 4


async def test_a_rollout_actor_that_the_router_has_given_up_is_lost(cluster: FakeCluster) -> None:
    """As after SIGSTOP for longer than the heartbeats, and SIGCONT: the router has forgotten its turns."""
    rollout = await cluster.open(ONE_TURN)
    for connection in cluster.system._local.network.connections:
        connection.inbound.end_streams()
    lost = await asyncio.wait_for(cluster.system.failure, 60.0)
    assert isinstance(lost, ActorDead) and is_loss(lost)
    assert str(lost) == f"actor {rollout.ref.name} died: router has given it up for its silence"


async def test_a_version_that_is_over_fails_the_turn(cluster: FakeCluster) -> None:
    rollout = await cluster.open(ONE_TURN)
    await serve(rollout, "solver", 2)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 1, "judge": 0})
    errors = [failed.error for failed in (await cluster.closed()).failures]
    assert errors == [f"WrongVersion: {WrongVersion('solver', 1, 2)}"] * 2


async def test_one_that_leaves_ends_its_turns_first(cluster: FakeCluster) -> None:
    cluster.instances["solver"] = [Slow(one_token), Slow(one_token)]
    rollout = await cluster.open(ONE_TURN)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 4, {"solver": 0, "judge": 0})
    await asyncio.sleep(5)
    begun = asyncio.get_running_loop().time()
    await cluster.router.ref.within(60.0).leave("solver-0")
    assert 5.0 <= asyncio.get_running_loop().time() - begun < 5.1
    group = await cluster.closed()
    assert group.samples[SOLVER] == 4 and group.figures["retried_turns"] == 0
    await start_step(rollout, 2, [QUERY], 3, {"solver": 0, "judge": 0})
    await cluster.closed()
    assert [len(fake.asked) for fake in cluster.instances["solver"]] == [2, 5]
    assert news(cluster) == [("solver-0", "draining"), ("solver-0", "gone")]


async def test_a_policy_that_gets_no_instance_back_ends_the_run(cluster: FakeCluster) -> None:
    rollout = await cluster.open(ONE_TURN)
    await serve(rollout, "solver", 0)
    for name in ("solver-0", "solver-1"):
        await cluster.system.remove(name)
    patience_s = RouterConfig().return_timeout_s
    await asyncio.sleep(patience_s - 1)
    assert not cluster.system.failure.done()
    await asyncio.sleep(2)
    failure = cluster.system.failure.result()
    assert isinstance(failure, NoInstance) and "policy solver has had no instance for 900 s" in str(failure)
