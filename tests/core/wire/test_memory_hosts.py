"""Hosts of the network in memory: links that are cut for a while, and hosts that are paused."""

import asyncio
from collections.abc import Callable

import pytest

from flexmarl.core.errors import ActorDead
from flexmarl.core.wire.faults import Faults

from .world import Worker, World, in_virtual_time


@in_virtual_time
async def test_messages_over_a_cut_link_wait_until_it_is_mended(world: World) -> None:
    ref = await world.two()
    await world.start("c")
    world.network.cut("a", "b")
    for number in range(10):
        await ref.tell("hear", number)
    call = asyncio.ensure_future(ref.api.all_heard())
    await asyncio.sleep(5.0)
    assert world.workers["b"].heard == [] and not call.done()
    assert await world.systems["a"].ref("worker", "memory://c", Worker).api.all_heard() == []
    world.network.mend("a", "b")
    assert await call == list(range(10))


@in_virtual_time
async def test_those_of_a_connection_that_was_given_up_meanwhile_are_lost(world: World) -> None:
    ref = await world.two()
    world.network.cut("a", "b")
    await ref.tell("hear", 1)
    with pytest.raises(ActorDead, match="silent"):
        await ref.within(1e6).hang()
    world.network.mend("a", "b")
    await ref.tell("hear", 2)
    assert await ref.api.all_heard() == [2]


@in_virtual_time
async def test_a_host_is_cut_off_and_paused_with_all_its_nodes(world: World) -> None:
    a = await world.start("here/a")
    workers = []
    for name in ("there/b", "there/c"):
        await world.start(name)
        workers.append(a.ref("worker", f"memory://{name}", Worker))
        await workers[-1].api.all_heard()
    network = world.network
    changes: list[tuple[Callable[[], None], Callable[[], None]]] = [
        (lambda: network.cut("there", "here"), lambda: network.mend("here", "there")),
        (lambda: network.pause_host("there"), lambda: network.resume_host("there")),
    ]
    for begin, end in changes:
        begin()
        assert not world.network.reaches("here", "there")
        calls = [asyncio.ensure_future(worker.within(1e6).all_heard()) for worker in workers]
        await asyncio.sleep(5.0)
        assert not any(call.done() for call in calls)
        end()
        assert world.network.reaches("here", "there")
        assert await asyncio.gather(*calls) == [[], []]


@in_virtual_time
async def test_a_node_that_starts_on_a_paused_host_is_paused(world: World) -> None:
    a = await world.start("here/a")
    world.network.pause_host("there")
    await world.start("there/b")
    call = asyncio.ensure_future(a.ref("worker", "memory://there/b", Worker).api.all_heard())
    await asyncio.sleep(1.0)
    assert not call.done()
    world.network.resume_host("there")
    assert await call == []


@in_virtual_time
async def test_the_second_copy_of_a_message_arrives_after_the_first(world: World) -> None:
    """Else it would overtake those before, which would be refused as too late."""
    ref = await world.two()
    world.network.faults = Faults(delay_s=(0.0, 1.0), duplicate=0.5, late_s=0.1)
    for number in range(200):
        await ref.tell("hear", number)
    await asyncio.sleep(10.0)
    assert world.workers["b"].heard == list(range(200))


@in_virtual_time
async def test_of_two_cuts_or_pauses_that_overlap_the_later_end_counts(world: World) -> None:
    """An end of the first one would join hosts that a fault has parted for ever."""
    await world.start("here/a")
    await world.start("there/b")
    network = world.network
    changes: list[tuple[Callable[[], None], Callable[[], None]]] = [
        (lambda: network.cut("there", "here"), lambda: network.mend("here", "there")),
        (lambda: network.pause_host("there"), lambda: network.resume_host("there")),
    ]
    for begin, end in changes:
        begin()
        begin()
        end()
        assert not network.reaches("here", "there")
        end()
        assert network.reaches("here", "there")
