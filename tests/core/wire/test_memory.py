"""The network in memory, and the runtime on it in virtual time under everything it can do."""

import asyncio
import os
import subprocess
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import ActorDead, CallTimeout, LocalProtocolError, SystemClosed
from flexmarl.core.protocol.codec import Buffer
from flexmarl.core.protocol.session import Settings
from flexmarl.core.testing import virtual_time
from flexmarl.core.wire.faults import Faults

from ...patience import PATIENCE_S
from ..cluster_storm import NAMES, weather
from .world import Worker, World, in_virtual_time, now_s

HERE = Path(__file__).parents[1]
SOURCES = HERE.parents[1] / "scripts" / "src"


# ------------------------------------------------------------------ the wire


@in_virtual_time
async def test_without_faults_all_arrives_in_order(world: World) -> None:
    ref = await world.two()
    world.network.faults = Faults(delay_s=(0.0, 1.0))
    for number in range(1000):
        await ref.tell("hear", number)
        if number % 10 == 0:
            await asyncio.sleep(0.01)
    assert await ref.api.all_heard() == list(range(1000))


@in_virtual_time
async def test_the_delay_is_as_said(world: World) -> None:
    ref = await world.two()
    world.network.faults = Faults(delay_s=(2.0, 3.0))
    began_s = now_s()
    for _ in range(50):
        await ref.api.all_heard()
    assert 50 * 4.5 < now_s() - began_s < 50 * 5.5, "there and back, 2.5 s each in the mean"


@in_virtual_time
async def test_a_lost_message_is_found_out_by_the_next_heartbeat(world: World) -> None:
    ref = await world.two()
    world.network.faults = Faults(drop=1.0)
    call = asyncio.ensure_future(ref.within(1e6).all_heard())
    await ref.tell("hear", 1)
    await asyncio.sleep(1.0)
    world.network.faults = Faults()
    with pytest.raises(ActorDead, match="the message, or its answer, was lost on the way"):
        await call
    assert now_s() <= 10.0 and world.workers["b"].heard == []
    session = world.systems["a"]._local.network.connection(ref.address).session.statistics()
    assert (session.in_flight, session.lost) == (0, 2)


@in_virtual_time
async def test_a_buffer_is_sent_as_it_was(world: World) -> None:
    class Keeper(Actor):
        @endpoint
        async def keep(self, data: Buffer) -> None:
            kept.append(bytes(data.view))

    kept: list[bytes] = []
    await world.two()
    await world.workers["b"].system.add(Keeper(), "keeper")
    data = bytearray(10_000)
    await world.workers["a"].system.ref("keeper", "memory://b").tell("keep", Buffer(data))
    data[:] = b"x" * 10_000
    await asyncio.sleep(1.0)
    assert kept == [bytes(10_000)]


@in_virtual_time
async def test_a_name_belongs_to_one_running_node(world: World) -> None:
    await world.start("a")
    with pytest.raises(OSError, match="a node named a is running already"):
        await world.start("a")
    with pytest.raises(LocalProtocolError, match="only memory:// is reached"):
        await world.workers["a"].system.ref("x", "tcp://127.0.0.1:1").ask("x")
    with pytest.raises(KeyError):
        world.network.crash("b")


@pytest.mark.parametrize(
    "settings", [{"drop": 1.1}, {"duplicate": -0.1}, {"delay_s": (2.0, 1.0)}, {"late_s": float("nan")}]
)
def test_faults_that_can_not_be_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Faults(**settings)  # type: ignore[arg-type]


# ------------------------------------------------------------------ what is done to nodes and the network


@in_virtual_time
async def test_a_crash_ends_all_that_runs_and_is_told_after_the_delay(world: World) -> None:
    ref = await world.two()
    call = asyncio.ensure_future(ref.api.hang())
    out = asyncio.ensure_future(world.workers["b"].system.ref("worker", "memory://a", Worker).api.hang())
    await asyncio.sleep(1.0)
    world.network.faults = Faults(delay_s=(0.5, 0.5))
    began_s = now_s()
    crashed, its_system = world.workers["b"], world.systems["b"]
    world.network.crash("b")
    with pytest.raises(SystemClosed):
        await out
    assert now_s() == began_s and isinstance(await its_system.failure, SystemClosed)
    with pytest.raises(ActorDead, match="its process ended"):
        await call
    assert now_s() == began_s + 0.5
    assert sorted(crashed.ends) == ["background", "hang"], "and no on_stop"
    assert not any("BYE" in line for line in world.network.log)
    with pytest.raises(SystemClosed):
        await crashed.system.ref("worker", "memory://a", Worker).api.all_heard()
    await world.start("b")
    assert await ref.api.all_heard() == []
    assert world.systems["b"]._wire.epoch > its_system._wire.epoch


@in_virtual_time
async def test_a_peer_connects_again_however_it_hears_first_of_the_end_and_of_the_next_start(
    world: World,
) -> None:
    """By the last message of the connection, or by the listener that has come in place of the other."""
    a = await world.start("a")
    ref = a.ref("worker", "memory://b", Worker)
    world.network.faults = Faults(delay_s=(0.0, 1.0))
    for _ in range(30):
        async with AsyncExitStack() as life, asyncio.timeout(60.0):
            await World(life, world.network).start("b")
            while True:
                with suppress(ActorDead):  # the goodbye of the one before is on the way
                    assert await ref.api.all_heard() == []
                    break


@in_virtual_time
async def test_a_silent_crash_is_found_out_by_heartbeats(world: World) -> None:
    ref = await world.two()
    world.network.crash("b", silently=True)
    with pytest.raises(ActorDead, match="silent for"):
        await ref.within(1e6).hang()
    assert now_s() <= 30.0
    call = asyncio.ensure_future(ref.within(1e6).hang())  # waits for its successor
    await world.start("b")
    assert await ref.api.all_heard() == [] and not call.done()
    call.cancel()


@in_virtual_time
async def test_behind_a_partition_an_actor_is_dead_within_three_heartbeats(world: World) -> None:
    ref = await world.two()
    await world.start("c")
    calls = [asyncio.ensure_future(ref.within(1e6).hang()) for _ in range(100)]
    for wait_s in (0.01, 9.0, 11.0):  # wherever in the rhythm of the heartbeats it comes
        await asyncio.sleep(wait_s)
        began_s = now_s()
        world.network.partition({"a"}, {"b"})
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, ActorDead) and result.actor == "worker" for result in results)
        assert 10.0 <= now_s() - began_s <= 30.0
        assert await world.workers["a"].system.ref("worker", "memory://c", Worker).api.all_heard() == []
        world.network.heal()
        assert await ref.api.all_heard() == []
        calls = [asyncio.ensure_future(ref.within(1e6).hang()) for _ in range(100)]


@in_virtual_time
async def test_a_paused_node_receives_all_when_it_is_resumed(world: World) -> None:
    ref = await world.two()
    world.network.pause("b")
    for number in range(10):
        await ref.tell("hear", number)
    await asyncio.sleep(5.0)
    assert world.workers["b"].heard == []
    call = asyncio.ensure_future(ref.api.all_heard())
    await asyncio.sleep(5.0)
    assert not call.done()
    world.network.resume("b")
    assert await call == list(range(10))
    world.network.pause("b")
    with pytest.raises(ActorDead, match="silent"):
        await ref.within(1e6).hang()
    world.network.resume("b")
    assert await ref.api.all_heard() == list(range(10))


# ------------------------------------------------------------------ the runtime under it


@pytest.mark.parametrize("faults", [Faults(drop=0.03), Faults(reorder=0.03), Faults(duplicate=0.9)], ids=str)
def test_a_stream_is_whole_or_ends_with_an_error_where_an_item_is_missing(faults: Faults) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            world = World(stack)
            ref = await world.two()
            world.network.faults = faults
            for _ in range(50):
                items: list[int] = []
                try:
                    async for item in ref.within(100.0).count(20):
                        items.append(item)  # noqa: PERF401  # what came before an error is wanted
                    whole.append(True)
                    assert len(items) == 20
                except (ActorDead, CallTimeout):
                    whole.append(False)
                assert items == list(range(len(items)))

    whole: list[bool] = []
    virtual_time.run(main())
    assert any(whole) and all(whole) == (faults.duplicate > 0)


def test_hours_of_timeouts_take_no_time() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            ref = await World(stack).two(Settings(heartbeat_s=60.0))
            for _ in range(3):
                with pytest.raises(CallTimeout):
                    await ref.within(3600.0).hang()
            assert now_s() == 3 * 3600.0

    virtual_time.run(main())


@pytest.mark.parametrize("seeds", [range(n, n + 10) for n in range(0, 30, 10)], ids=str)
def test_in_any_storm_requests_end_in_time_in_order_and_at_most_once(seeds: range) -> None:
    """That each ends in time is asserted where it is asked."""
    for seed in seeds:
        books = weather(seed).books
        assert books.ends["done"] > 50 and len(books.begun) >= len(NAMES), seed
        assert set(books.executed.values()) == {1}, seed
        assert all(numbers == sorted(numbers) for numbers in books.begun.values()), seed


def log_of(seed: int, hash_seed: str) -> bytes:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(SOURCES)}
    command = [sys.executable, str(HERE / "cluster_storm.py"), str(seed)]
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, timeout=PATIENCE_S
    ).stdout


def test_a_seed_gives_the_same_log_in_every_process_byte_by_byte() -> None:
    one, same, other = log_of(1, "1"), log_of(1, "2"), log_of(2, "1")
    assert one.count(b"\n") > 1000
    assert one == same
    assert one != other


@in_virtual_time
async def test_a_deadline_covers_the_wait_for_credit_too(world: World) -> None:
    ref = await world.two(Settings(window_requests=1))
    first = asyncio.ensure_future(ref.within(0.9).hang())
    began_s = now_s()
    with pytest.raises(CallTimeout):
        await ref.within(1.0).hang()
    assert now_s() == began_s + 1.0
    with pytest.raises(CallTimeout):
        await first
