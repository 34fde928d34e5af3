"""Weights that turns wait for come first: the rule, and the router actor with two policies that publish at once."""

import asyncio
from contextlib import aclosing

from flexmarl.actors.inference.router.load_order import LoadOrder
from flexmarl.actors.messages import RouteRequest
from flexmarl.actors.names import PolicyName, Version

from .test_router_actor import HOUR_S, JUDGE, SOLVER, FakeCluster, Instance, in_virtual_time

OTHER = PolicyName("other")


def test_without_turns_that_wait_all_policies_load_at_once() -> None:
    order = LoadOrder(lambda _: False)
    order.begun(SOLVER)
    assert order.may_begin(JUDGE) and order.may_begin(SOLVER)


def test_a_policy_that_no_turn_waits_for_is_behind_those_that_turns_wait_for() -> None:
    awaited = {JUDGE}
    order = LoadOrder(lambda policy: policy in awaited)
    assert order.may_begin(SOLVER), "the judge does not load"
    order.begun(JUDGE)
    order.begun(JUDGE)
    assert not order.may_begin(SOLVER)
    awaited.add(OTHER)
    assert order.may_begin(OTHER) and order.may_begin(JUDGE)
    order.ended(JUDGE)
    assert not order.may_begin(SOLVER), "another instance of the judge still loads"
    order.ended(JUDGE)
    assert order.may_begin(SOLVER)


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
