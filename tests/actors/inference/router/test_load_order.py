"""Weights that turns wait for come first: the rule, and the router actor with two policies that publish at once."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

from flexmarl.actors.inference.router.load_order import LoadOrder
from flexmarl.actors.messages import RouteRequest
from flexmarl.actors.names import PolicyName, Version
from flexmarl.core.supervision.system_api import SystemApi

from .test_router_actor import HOUR_S, JUDGE, SOLVER, FakeCluster, Instance, in_virtual_time

OTHER = PolicyName("other")


def test_without_turns_that_wait_all_policies_load_at_once() -> None:
    order = LoadOrder(lambda _: False)
    order.begun(1, "solver-0", SOLVER)
    assert order.before(JUDGE) == order.before(SOLVER) == []


def test_a_policy_that_no_turn_waits_for_is_behind_those_that_turns_wait_for() -> None:
    awaited = {JUDGE}
    order = LoadOrder(lambda policy: policy in awaited)
    assert order.before(SOLVER) == [], "the judge does not load"
    order.begun(1, "judge-0", JUDGE)
    order.begun(2, "judge-1", JUDGE)
    assert order.before(SOLVER) == ["judge-0", "judge-1"]
    awaited.add(OTHER)
    assert order.before(OTHER) == order.before(JUDGE) == []
    order.ended(1)
    assert order.before(SOLVER) == ["judge-1"], "another instance of the judge still loads"
    order.ended(1)
    assert order.before(SOLVER) == ["judge-1"], "of one that was given up the end comes twice"
    order.ended(2)
    assert order.before(SOLVER) == []


def loads(*, late_turn_s: float | None, load_s: float = 4.0) -> dict[PolicyName, float]:
    """Seconds until both policies, whose loads take ``load_s``, are installed. A turn waits for the judge from the
    beginning, and one for the solver ``late_turn_s`` later."""
    seconds: dict[PolicyName, float] = {}

    async def case(cluster: FakeCluster) -> None:
        loop = asyncio.get_running_loop()
        for policy in (SOLVER, JUDGE):
            await cluster.add(f"{policy}-0", Instance(load_s), policy)
        await asyncio.gather(*(cluster.publish(0, policy) for policy in (SOLVER, JUDGE)))

        async def publish(policy: PolicyName) -> None:
            await cluster.publish(1, policy)
            seconds[policy] = loop.time() - begin

        async def ask(policy: PolicyName, turn: int) -> None:
            assert routes.session is not None
            request = RouteRequest(turn, policy, Version(1), None, 1, 0.0, "")
            await cluster.router.api.turns(routes.session, [request], [])

        async with aclosing(cluster.router.within(HOUR_S).routes("rollout-0")) as stream:
            routes = await anext(stream)
            await ask(JUDGE, 1)
            begin = loop.time()
            async with asyncio.TaskGroup() as group:
                for policy in (JUDGE, SOLVER):
                    group.create_task(publish(policy))
                if late_turn_s is not None:
                    await asyncio.sleep(late_turn_s)
                    await ask(SOLVER, 2)
        assert cluster.console.seen == [], "no instance was given up"

    in_virtual_time(case)
    return {policy: round(at_s, 1) for policy, at_s in seconds.items()}


def test_a_load_waits_for_those_that_turns_wait_for() -> None:
    assert loads(late_turn_s=None) == {JUDGE: 4.0, SOLVER: 8.0}


def test_a_turn_has_its_policy_load_at_once() -> None:
    assert loads(late_turn_s=1.5) == {JUDGE: 4.0, SOLVER: 5.5}


def test_a_load_that_waits_for_others_has_its_whole_time_afterwards() -> None:
    """By default a load has 900 s: an instance whose load began after 600 s would be given up before its end."""
    assert loads(late_turn_s=None, load_s=600.0) == {JUDGE: 600.0, SOLVER: 1200.0}


@asynccontextmanager
async def second_version_of_the_judge(
    cluster: FakeCluster, judge: Instance, solver: Instance
) -> AsyncGenerator[None]:
    """Both have their first versions, and the judge's second one is published. More turns wait for it than its
    instances have room for."""
    seconds, judge.seconds = judge.seconds, 0.0
    await cluster.add("judge-0", judge, JUDGE)
    await cluster.add("solver-0", solver, SOLVER)
    await asyncio.gather(*(cluster.publish(0, policy) for policy in (SOLVER, JUDGE)))
    judge.seconds = seconds
    async with aclosing(cluster.router.within(HOUR_S).routes("rollout-0")) as stream:
        session = (await anext(stream)).session
        assert session is not None
        requests = [RouteRequest(turn, JUDGE, Version(1), None, 1, 0.0, "") for turn in range(20)]
        await cluster.router.api.turns(session, requests, [])
        publishing = asyncio.ensure_future(cluster.publish(1, JUDGE))
        yield
        publishing.cancel()
        await asyncio.wait([publishing])


def test_a_load_that_hangs_holds_others_until_it_is_late() -> None:
    """It is late after 900 s."""

    async def case(cluster: FakeCluster) -> None:
        loop = asyncio.get_running_loop()
        async with second_version_of_the_judge(cluster, Instance(12 * HOUR_S), Instance(4.0)):
            for version in (1, 2):
                began = loop.time()
                publishing = asyncio.ensure_future(cluster.publish(version, SOLVER))
                await asyncio.sleep(1.0)
                if version == 1:
                    waits = await cluster.system.ref(
                        "system", cluster.system.address, SystemApi
                    ).api.process_waits()
                    text = "judge-0 with weights that turns wait for, before solver-0 loads those of solver"
                    limit = "router.load_timeout_s=900 ends it"
                    assert (text, limit) in [(wait.text, wait.limit) for wait in waits["router"]]
                await publishing
                seconds.append(loop.time() - began)
        assert cluster.console.seen == [("judge-0", "suspected")]

    seconds: list[float] = []
    in_virtual_time(case)
    assert [round(s, 1) for s in seconds] == [904.0, 4.0], "the second one is not held by it again"


def test_loads_that_follow_each_other_hold_others_no_longer_than_a_load_may_take() -> None:
    async def case(cluster: FakeCluster) -> None:
        loop = asyncio.get_running_loop()
        async with second_version_of_the_judge(cluster, Instance(600.0), Instance(4.0)):
            began = loop.time()
            publishing = asyncio.ensure_future(cluster.publish(1, SOLVER))
            await asyncio.sleep(500.0)
            await cluster.add("judge-1", Instance(600.0), JUDGE)
            await publishing
            seconds.append(loop.time() - began)
        assert cluster.console.seen == [], "the load has its whole time afterwards"

    seconds: list[float] = []
    in_virtual_time(case)
    assert [round(s, 1) for s in seconds] == [904.0]
