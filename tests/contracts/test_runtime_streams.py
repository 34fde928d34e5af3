"""The runtime's contract: streams and back-pressure, over every wire."""

import asyncio
from contextlib import aclosing

import pytest

from flexmarl.core.errors import (
    ActorDead,
    CallTimeout,
    RemoteError,
    RemoteProtocolError,
)
from flexmarl.core.protocol import messages
from flexmarl.core.protocol.envelopes import Kind
from flexmarl.core.protocol.session import Settings
from flexmarl.core.supervision.system_actor import SystemActor

from ..patience import PATIENCE_S
from .clusters import Cluster, over_every_transport, until
from .pairs import all_credit_is_back, session_of, two
from .runtime_actors import Point, Subject
from .strangers import Stranger, packed


class TestStreams:
    @over_every_transport
    async def test_all_items_come_in_order(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster)
        assert [item async for item in subject.api.count(1000)] == list(range(1000))
        assert [item async for item in subject.api.count(0)] == []
        assert actor.streaming == 0
        assert all_credit_is_back(asking, subject)

    @over_every_transport
    async def test_items_of_any_size_come(self, cluster: Cluster) -> None:
        _, _, subject = await two(cluster, Settings(window_bytes=2**16))
        sizes = [2**10, 2**20, 2**16, 1, *[2**15] * 100]
        assert [buffer.view.nbytes async for buffer in subject.within(PATIENCE_S).buffers(sizes)] == sizes

    @over_every_transport
    async def test_leaving_early_ends_the_producer(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster)
        async with aclosing(subject.api.count_and_hang(3)) as items:  # type: ignore[type-var]
            assert [await anext(items), await anext(items)] == [0, 1]
            assert actor.streaming == 1
        await until(lambda: actor.streaming == 0)
        await until(lambda: all_credit_is_back(asking, subject))

    @over_every_transport
    async def test_a_slow_consumer_slows_the_producer(self, cluster: Cluster) -> None:
        _, actor, subject = await two(cluster, Settings(stream_window=8))
        taken = 0
        async for item in subject.api.count(100):
            assert item == taken
            taken += 1
            await asyncio.sleep(0.001)
            assert actor.produced <= taken + 8 + 1, "the window, and the item that waits for room"
        assert taken == 100

    @over_every_transport
    async def test_the_producers_error_comes_after_its_items(self, cluster: Cluster) -> None:
        asking, _, subject = await two(cluster)
        items = []
        with pytest.raises(RemoteError, match="count_and_fail raised ValueError: no more numbers"):
            async for item in subject.api.count_and_fail(5):
                items.append(item)  # noqa: PERF401  # what came before the error is wanted
        assert items == list(range(5))
        assert all_credit_is_back(asking, subject)

    @over_every_transport
    async def test_the_deadline_is_each_items(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster)
        assert await subject.api.add(0) == 1  # it is connected
        items = []
        with pytest.raises(CallTimeout, match=r"count_and_hang: .* 1 s \(waiting for the next item\)"):
            async for item in subject.within(1.0).count_and_hang(3):
                items.append(item)
                await asyncio.sleep(0.4)
        assert items == [0, 1, 2]
        await until(lambda: actor.streaming == 0)
        await until(lambda: all_credit_is_back(asking, subject))

    @over_every_transport
    async def test_items_are_validated_by_the_caller(self, cluster: Cluster) -> None:
        asking, _, subject = await two(cluster)
        with pytest.raises(RemoteProtocolError, match="result of Subject.wrong_items: .*valid integer"):
            _ = [item async for item in subject.api.wrong_items()]
        with pytest.raises(RemoteProtocolError, match="is not a stream: await it"):
            _ = [item async for item in subject.stream("move", Point(1))]
        await until(lambda: all_credit_is_back(asking, subject))

    @over_every_transport
    async def test_the_death_of_either_side_ends_the_stream(self, cluster: Cluster) -> None:
        asking = await cluster.start("asking")
        async with cluster.system("serving") as serving:
            await serving.add(Subject(), "subject")
            items = asking.ref("subject", serving.address, Subject).api.count_and_hang(1)
            assert await anext(items) == 0
        with pytest.raises(ActorDead):
            await anext(items)

        actor = Subject()
        theirs = await asking.add(actor, "subject")
        async with cluster.system("reading") as reading:
            items = reading.ref("subject", theirs.address, Subject).api.count_and_hang(1)
            assert await anext(items) == 0
            assert actor.streaming == 1
        await until(lambda: actor.streaming == 0)


class TestBackPressure:
    @over_every_transport
    async def test_a_flood_is_slowed_and_nothing_is_lost(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster, Settings(window_requests=8))
        actor.gate.clear()
        sent = 0

        async def flood() -> None:
            nonlocal sent
            for number in range(200):
                await subject.tell("hear_slowly", number)
                sent += 1

        flooding = asyncio.ensure_future(flood())
        await until(lambda: len(actor.began) == 8)
        await until(lambda: session_of(asking).waiting_for_credit == 1)
        assert (sent, session_of(asking).in_flight) == (8, 8)
        with pytest.raises(
            CallTimeout, match=r"subject.move: .* \(waiting for credit, 8 requests are under way"
        ):
            await subject.within(0.05).move(Point(1))
        assert (sent, len(actor.began)) == (8, 8)
        actor.gate.set()
        await flooding
        await until(lambda: len(actor.heard) == 200)
        assert actor.heard == list(range(200))
        await until(lambda: all_credit_is_back(asking, subject))

    @over_every_transport
    async def test_one_slow_actor_does_not_slow_another(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster, Settings(window_requests=4))
        actor.gate.clear()
        other = asking.ref("system", subject.address, SystemActor)
        calls = [asyncio.create_task(subject.api.take(b"")) for _ in range(8)]
        await until(lambda: session_of(asking).waiting_for_credit == 4)
        assert await other.api.lookup("nobody") is None
        actor.gate.set()
        assert await asyncio.gather(*calls) == [0] * 8

    @over_every_transport
    async def test_a_byte_window_lets_one_larger_message_pass(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster, Settings(window_bytes=1000))
        actor.gate.clear()
        large = asyncio.create_task(subject.api.take(bytes(100_000)))
        await until(lambda: session_of(asking).in_flight == 1)
        small = asyncio.create_task(subject.api.take(b"small"))
        await until(lambda: session_of(asking).waiting_for_credit == 1)
        actor.gate.set()
        assert list(await asyncio.gather(large, small)) == [100_000, 5]
        assert all_credit_is_back(asking, subject)

    @over_every_transport
    async def test_callers_that_wait_stay_within_the_byte_window(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster, Settings(window_bytes=2**16))
        credit = asking._local.network.connection(subject.address).session.requests.credit("subject")
        actor.gate.clear()
        calls = [asyncio.create_task(subject.api.take(b"x" * 2**15)) for _ in range(50)]
        await until(lambda: len(credit.waiting) >= 48)
        actor.gate.set()
        while not all(call.done() for call in calls):
            assert credit.size_bytes < 2**16 + 2**15 + 1000
            await asyncio.sleep(0)
        assert await asyncio.gather(*calls) == [2**15] * 50

    @over_every_transport
    async def test_who_gives_up_waiting_holds_nothing(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster, Settings(window_requests=2))
        actor.gate.clear()
        calls = [asyncio.create_task(subject.api.take(b"")) for _ in range(20)]
        await until(lambda: session_of(asking).waiting_for_credit == 18)
        for call in calls[2:]:
            call.cancel()
        actor.gate.set()
        await asyncio.wait(calls)
        assert [call.cancelled() for call in calls] == [False] * 2 + [True] * 18
        await until(lambda: all_credit_is_back(asking, subject))

    @over_every_transport
    async def test_answers_to_a_caller_that_does_not_read_are_bounded(self, cluster: Cluster) -> None:
        _, actor, subject = await two(cluster)
        frozen = Stranger()
        async with cluster.stranger(messages.pack_header("frozen", 1), frozen) as wire:
            link = wire.connect(subject.address)
            for number in range(1, 1001):
                link.send(packed(Kind.CALL, number, "subject", "fill", 60.0, [[10**6], {}, 1]))
            await until(lambda: frozen.marks and frozen.replies)
            await until(lambda: actor.filled >= 9)
            assert await subject.api.fill(1) == bytes(1), "another caller is served"
            for _ in range(3):  # and the marks have arrived by then
                await asyncio.sleep(0.05)
                assert actor.filled == 9 + 1, "a window of answers, and those of the other caller"
            frozen.reads = True
            link.send(packed(Kind.PONG, frozen.marks[-1], []))
            await until(lambda: len(frozen.replies) == 1000)
        assert sorted(frozen.replies) == list(range(1, 1001)) and actor.filled == 1001

    @over_every_transport
    async def test_large_answers_flow_to_a_caller_that_reads(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster, Settings(window_bytes=2**16))
        answers = await asyncio.gather(*(subject.api.fill(20_000) for _ in range(200)))
        assert {len(answer) for answer in answers} == {20_000} and actor.filled == 200
        assert all_credit_is_back(asking, subject)
