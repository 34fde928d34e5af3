"""The runtime's contract: promises between two systems, over every wire."""

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from unittest import mock

import pytest
import structlog

from flexmarl.core.errors import (
    ActorDead,
    CallTimeout,
    LocalProtocolError,
    RemoteError,
    RemoteProtocolError,
    Unreachable,
)
from flexmarl.core.protocol import codec, envelopes
from flexmarl.core.protocol.codec import Buffer
from flexmarl.core.protocol.envelopes import Kind
from flexmarl.core.protocol.incarnations import new_epoch
from flexmarl.core.protocol.session import LinkState, SessionStatistics, Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.system_actor import SystemActor
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.wire import Frames, Link

from .clusters import QUICK, Cluster, over_every_transport, until
from .runtime_actors import Late, MisreadSubject, Point, Refused, Subject


async def two(cluster: Cluster, settings: Settings = QUICK) -> tuple[ActorSystem, Subject, ActorRef[Subject]]:
    """A system that asks, an actor of another one, and the former's reference to it."""
    asking, serving = await cluster.start("asking", settings), await cluster.start("serving", settings)
    subject = Subject()
    await serving.add(subject, "subject")
    return asking, subject, asking.ref("subject", serving.address, Subject)


def session_of(system: ActorSystem) -> SessionStatistics:
    """Statistics of the only peer that ``system`` has called."""
    asked = [peer.session for peer in system.statistics().peers if peer.session.requests]
    assert len(asked) <= 1
    return asked[0] if asked else SessionStatistics()


def all_credit_is_back(system: ActorSystem, ref: ActorRef[Subject]) -> bool:
    credit = system._local.network.peer(ref.address).session.requests.credit(ref.name)
    return (session_of(system).in_flight, credit.requests, credit.size_bytes, len(credit.waiting)) == (
        0,
        0,
        0,
        0,
    )


class TestCalls:
    @over_every_transport
    async def test_types_arrive_and_the_books_are_even_after_it(self, cluster: Cluster) -> None:
        asking, _, subject = await two(cluster)
        assert await subject.api.move(Point(1, ("a", "b")), by=2) == Point(3, ("a", "b"))
        answers = await asyncio.gather(*(subject.api.move(Point(number)) for number in range(500)))
        assert [answer.x for answer in answers] == list(range(1, 501))
        assert session_of(asking).requests == 501
        assert all_credit_is_back(asking, subject)

    @over_every_transport
    async def test_errors_come_as_what_they_are(self, cluster: Cluster) -> None:
        asking, _, subject = await two(cluster)
        with pytest.raises(RemoteError, match="subject.fail raised KeyError: 'nothing here'") as caught:
            await subject.api.fail("nothing here")
        assert "in fail" in caught.value.remote_traceback
        with pytest.raises(RemoteProtocolError, match="move: point.x: .*valid integer"):
            await subject.ask("move", {"x": "one"})
        with pytest.raises(RemoteProtocolError, match="has no endpoint 'nothing'"):
            await subject.ask("nothing")
        with pytest.raises(RemoteProtocolError, match="is a stream: iterate over it"):
            await subject.ask("count", 3)
        with pytest.raises(ActorDead, match="actor missing died: serving has no actor of that name"):
            await asking.ref("missing", subject.address, Subject).api.move(Point(1))
        with pytest.raises(LocalProtocolError, match="can't be sent"):
            await subject.ask("hear", object())
        assert await subject.api.move(Point(1)) == Point(2)
        assert all_credit_is_back(asking, subject)

    @over_every_transport
    async def test_an_endpoint_that_panics_answers_at_once(self, cluster: Cluster) -> None:
        asking, _, far = await two(cluster)
        near = await asking.add(Subject(), "near")
        for subject in (far, near):
            with structlog.testing.capture_logs() as logs:
                async with asyncio.timeout(10):
                    for call in (
                        subject.api.panic("oh"), subject.api.panic("oh", 0.01), subject.api.panic_once("oh")
                    ):  # fmt: skip
                        with pytest.raises(RemoteError, match="raised Panic: oh") as caught:
                            await call
                        assert "in panic" in caught.value.remote_traceback
                    with pytest.raises(RemoteError, match="raised Panic: no more numbers"):
                        async for _ in subject.api.count_and_panic(2):
                            pass
                    await subject.tell("panic", "oh")
                    assert await subject.api.move(Point(1)) == Point(2)
            events = [entry["event"] for entry in logs]
            assert events == ["endpoint panicked"] * 4 + ["one-way message failed"]
            requests = asking._local.network.peer(subject.address).session.requests
            await until(lambda all_open=requests: not len(all_open))  # type: ignore[misc]
            credit = requests.credit(subject.name)
            assert (credit.requests, credit.size_bytes) == (0, 0)

    @over_every_transport
    async def test_one_way_messages_arrive_in_order(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster)
        for number in range(500):
            await subject.tell("hear", number)
        await subject.api.move(Point(1))
        assert actor.heard == list(range(500))
        await subject.tell("fail", "the caller does not notice")
        await subject.tell("nothing")
        await asking.ref("nobody", subject.address).tell("hear", 1)
        await until(lambda: session_of(asking).in_flight == 0)

    @over_every_transport
    async def test_a_reference_works_wherever_it_arrives(self, cluster: Cluster) -> None:
        asking, _, subject = await two(cluster)
        third = await cluster.start("third")
        far = await third.add(Subject(), "far")
        assert await subject.api.ask_through(far, Point(1)) == Point(2)
        here = await asking.add(Subject(), "here")
        assert await subject.api.ask_through(here, Point(2)) == Point(3)

    @over_every_transport
    async def test_calls_of_all_kinds_made_before_the_connection_stands_arrive(
        self, cluster: Cluster
    ) -> None:
        _, actor, subject = await two(cluster)
        calls = [subject.api.move(Point(1)), subject.api.add_once(1), subject.api.add(2)]
        answers = asyncio.gather(*calls)
        await subject.tell("hear", 1)
        assert await answers == [Point(2), 1, 1]
        assert await subject.api.move(Point(1)) == Point(2) and actor.heard == [1]

    @over_every_transport
    async def test_a_value_that_python_can_not_hold_costs_nobody_else(self, cluster: Cluster) -> None:
        _, actor, subject = await two(cluster)
        waiting = asyncio.ensure_future(subject.api.hang())
        await until(lambda: actor.hanging == 1)
        others = asyncio.gather(*(subject.api.move(Point(number)) for number in range(10)))
        bad = asyncio.gather(
            subject.ask("move", {(1, 2): 3}), subject.api.unholdable(), return_exceptions=True
        )
        await subject.tell("hear", {(1, 2): 3})
        await subject.tell("hear", 7)
        assert len(await others) == 10
        for error, words in zip(await bad, ("Subject.move: its arguments", "the result"), strict=True):
            assert isinstance(error, RemoteProtocolError) and f"{words} can't be decoded" in str(error)
        await until(lambda: actor.heard == [7])
        assert not waiting.done()
        waiting.cancel()

    @over_every_transport
    async def test_what_is_told_before_closing_is_carried_out(self, cluster: Cluster) -> None:
        serving = await cluster.start("serving")
        far, near = Subject(), Subject()
        await serving.add(far, "subject")
        async with cluster.system("asking") as asking:
            own = await asking.add(near, "own")
            other = asking.ref("subject", serving.address, Subject)
            for number in range(300):
                await own.tell("hear", number)
                await other.tell("hear", number)
        assert near.heard == list(range(300))
        await until(lambda: far.heard == list(range(300)))

    @over_every_transport
    async def test_large_buffers_arrive_equal(self, cluster: Cluster) -> None:
        _, _, subject = await two(cluster)
        sent = bytes(range(256)) * (10 * 2**20 // 256)
        received = (await subject.api.mirror(Buffer(bytearray(sent)))).view
        assert received.nbytes == 10 * 2**20 and received == sent
        assert received.contiguous

    @over_every_transport
    async def test_idempotent_calls_are_answered_once_each(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster)
        assert await asyncio.gather(*(subject.api.add_once(key) for key in range(50))) == [1] * 50
        assert actor.added == dict.fromkeys(range(50), 1)
        assert all_credit_is_back(asking, subject)


class TestDeclaredErrors:
    @over_every_transport
    async def test_a_declared_error_is_raised_as_its_class_with_its_fields(self, cluster: Cluster) -> None:
        asking, _, subject = await two(cluster)
        with pytest.raises(Refused, match="number 3 is refused, for 2 points") as caught:
            await subject.api.refuse(3)
        error = caught.value
        assert (error.number, error.points) == (3, (Point(3), Point(2, ("a", "b"))))
        remote = error.__cause__
        assert isinstance(remote, RemoteError) and (remote.kind, remote.endpoint) == ("Refused", "refuse")
        assert "in refuse" in remote.remote_traceback
        with pytest.raises(Late, match="^number 4$"):
            await subject.api.refuse(4, "late")
        with pytest.raises(Refused):
            await subject.ask("refuse", 5)
        assert all_credit_is_back(asking, subject)

    @over_every_transport
    async def test_an_actor_in_this_system_raises_the_same(self, cluster: Cluster) -> None:
        asking, _, _ = await two(cluster)
        near = await asking.add(Subject(), "near")
        with pytest.raises(Refused, match="number 3 is refused, for 2 points") as caught:
            await near.api.refuse(3)
        assert isinstance(caught.value.__cause__, RemoteError)
        with pytest.raises(RemoteError, match="near.refuse raised LookupError: 'number 3'|number 3"):
            await near.api.refuse(3, "undeclared")

    @over_every_transport
    async def test_any_other_error_is_a_remote_error(self, cluster: Cluster) -> None:
        asking, _, subject = await two(cluster)
        with pytest.raises(RemoteError, match="subject.refuse raised LookupError: number 1"):
            await subject.api.refuse(1, "undeclared")
        for how in ("unsendable", "unholdable", "too large"):
            with pytest.raises(RemoteError, match="raised Refused: number 2 is refused") as caught:
                await subject.api.refuse(2, how)
            assert "in refuse" in caught.value.remote_traceback
        with pytest.raises(Late, match="^number 3$") as late:  # the nearest declared base
            await subject.api.refuse(3, "late again")
        assert isinstance(late.value.__cause__, RemoteError) and late.value.__cause__.kind == "LateAgain"
        assert all_credit_is_back(asking, subject)

    @over_every_transport
    async def test_the_callers_declaration_decides_which_class_is_built(self, cluster: Cluster) -> None:
        asking, _, subject = await two(cluster)
        misread = asking.ref("subject", subject.address, MisreadSubject)
        with pytest.raises(RemoteError, match="raised Refused: number 3 is refused") as caught:
            await misread.api.refuse(3)
        assert any("is not raised as Refused: number: " in note for note in caught.value.__notes__)
        untyped: ActorRef[Subject] = asking.ref("subject", subject.address)
        with pytest.raises(RemoteError, match="raised Refused: number 3") as bare:
            await untyped.ask("refuse", 3)
        assert bare.value.declared == "Refused" and bare.value.fields["number"] == 3
        with pytest.raises(RemoteError, match="raised Refused: number 4"):
            await misread.api.refuse_once(4)

    @over_every_transport
    async def test_a_stream_ends_with_it_after_its_items(self, cluster: Cluster) -> None:
        asking, _, subject = await two(cluster)
        items = []
        with pytest.raises(Refused, match="number 5 is refused") as caught:
            async for item in subject.api.count_and_refuse(5):
                items.append(item)  # noqa: PERF401  # what came before the error is wanted
        assert items == list(range(5)) and isinstance(caught.value.__cause__, RemoteError)
        assert all_credit_is_back(asking, subject)

    @over_every_transport
    async def test_it_passes_through_actors_that_declare_it(self, cluster: Cluster) -> None:
        _, _, subject = await two(cluster)
        far = await (await cluster.start("third")).add(Subject(), "far")
        with pytest.raises(Refused, match="number 7 is refused, for 2 points") as caught:
            await subject.api.refuse_through(far, 7)
        remote = caught.value.__cause__
        assert isinstance(remote, RemoteError)
        assert "in refuse_through" in remote.remote_traceback and "in refuse\n" in remote.remote_traceback

    @over_every_transport
    async def test_idempotent_calls_get_it_once_each(self, cluster: Cluster) -> None:
        _, actor, subject = await two(cluster)
        calls = [subject.api.refuse_once(number) for number in range(20)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [error.number for error in errors if isinstance(error, Refused)] == list(range(20))
        assert actor.added == dict.fromkeys(range(20), 1)


class TestEnding:
    @over_every_transport
    async def test_a_deadline_names_actor_endpoint_and_phase(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster)
        await subject.api.move(Point(1))
        with pytest.raises(
            CallTimeout, match=r"subject.hang: no answer within 0.05 s \(waiting for the reply\)"
        ):
            await subject.within(0.05).hang()
        await until(lambda: actor.hanging == 0)
        await until(lambda: all_credit_is_back(asking, subject))
        assert (session_of(asking).expired, session_of(asking).late_replies) == (1, 1)

    @over_every_transport
    async def test_cancelling_reaches_the_callee(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster)
        calls = [asyncio.ensure_future(subject.api.hang()) for _ in range(10)]
        await until(lambda: actor.hanging == 10)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        await until(lambda: actor.hanging == 0)
        await until(lambda: all_credit_is_back(asking, subject))

    @over_every_transport
    async def test_closing_a_system_fails_the_calls_to_it_at_once(self, cluster: Cluster) -> None:
        asking = await cluster.start("asking")
        loop = asyncio.get_running_loop()
        async with cluster.system("serving") as serving:
            actor = Subject()
            await serving.add(actor, "subject")
            subject = asking.ref("subject", serving.address, Subject)
            calls = [asyncio.ensure_future(subject.within(60).hang()) for _ in range(100)]
            await until(lambda: actor.hanging == 100)
            before_s = loop.time()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, ActorDead) and result.actor == "subject" for result in results)
        assert loop.time() - before_s < 2.0
        await until(lambda: all_credit_is_back(asking, subject))
        with pytest.raises(ActorDead):
            await subject.api.move(Point(1))

    @over_every_transport
    async def test_a_reference_works_again_when_its_system_comes_again(self, cluster: Cluster) -> None:
        asking = await cluster.start("asking", Settings(connect_timeout_s=10))
        address = ""
        for turn in range(3):
            async with cluster.system("serving", again_at=address) as serving:
                address = serving.address
                await serving.add(Subject(), "subject")
                subject = asking.ref("subject", address, Subject)
                assert await subject.api.add(turn) == 1
            (peer,) = (peer for peer in asking.statistics().peers if peer.address == address)
            await until(lambda: asking._local.network.peer(address).session.state is LinkState.DOWN)  # noqa: B023
            assert (peer.node, peer.session.in_flight) == ("serving", 0)

    @over_every_transport
    async def test_where_nobody_listens_is_unreachable_and_nothing_is_left_over(
        self, cluster: Cluster
    ) -> None:
        asking = await cluster.start("asking")
        nobody = asking.ref("nobody", cluster.nowhere(), Subject)
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        with pytest.raises(Unreachable, match=r"no connection within 0.2 s"):
            await nobody.api.move(Point(1))
        await nobody.tell("hear", 1)
        with pytest.raises(Unreachable):
            await nobody.api.add_once(1)
        assert 0.4 <= loop.time() - before_s < 2.0
        assert all_credit_is_back(asking, nobody)

    @over_every_transport
    async def test_what_failed_as_unreachable_is_not_carried_out_later(self, cluster: Cluster) -> None:
        async with cluster.system("serving") as serving:
            address = serving.address
        asking = await cluster.start("asking")
        subject = asking.ref("subject", address, Subject)
        with pytest.raises(Unreachable):
            await subject.api.add(1)
        async with cluster.system("serving", again_at=address) as serving:
            actor = Subject()
            await serving.add(actor, "subject")
            assert await subject.api.add(2) == 1
            assert actor.added == {2: 1}


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
        _, _, subject = await two(cluster, replace(QUICK, window_bytes=2**16))
        sizes = [2**10, 2**20, 2**16, 1, *[2**15] * 100]
        assert [buffer.view.nbytes async for buffer in subject.within(5).buffers(sizes)] == sizes

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
        items = []
        with pytest.raises(CallTimeout, match=r"count_and_hang: .* 0.05 s \(waiting for the next item\)"):
            async for item in subject.within(0.05).count_and_hang(3):
                items.append(item)
                await asyncio.sleep(0.03)
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
        calls = [asyncio.ensure_future(subject.api.take(b"")) for _ in range(8)]
        await until(lambda: session_of(asking).waiting_for_credit == 4)
        assert await other.api.lookup("nobody") is None
        actor.gate.set()
        assert await asyncio.gather(*calls) == [0] * 8

    @over_every_transport
    async def test_a_byte_window_lets_one_larger_message_pass(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster, Settings(window_bytes=1000))
        actor.gate.clear()
        large = asyncio.ensure_future(subject.api.take(bytes(100_000)))
        await until(lambda: session_of(asking).in_flight == 1)
        small = asyncio.ensure_future(subject.api.take(b"small"))
        await until(lambda: session_of(asking).waiting_for_credit == 1)
        actor.gate.set()
        assert list(await asyncio.gather(large, small)) == [100_000, 5]
        assert all_credit_is_back(asking, subject)

    @over_every_transport
    async def test_callers_that_wait_stay_within_the_byte_window(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster, replace(QUICK, window_bytes=2**16))
        credit = asking._local.network.peer(subject.address).session.requests.credit("subject")
        actor.gate.clear()
        calls = [asyncio.ensure_future(subject.api.take(b"x" * 2**15)) for _ in range(50)]
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
        calls = [asyncio.ensure_future(subject.api.take(b"")) for _ in range(20)]
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
        async with cluster.stranger(codec.pack_header("frozen", 1), frozen) as wire:
            link = wire.connect(subject.address)
            for number in range(1, 1001):
                link.send(packed(Kind.CALL, number, "subject", "fill", 60.0, [10**6], {}, 1))
            await until(lambda: frozen.marks)
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
        asking, actor, subject = await two(cluster, replace(QUICK, window_bytes=2**16))
        answers = await asyncio.gather(*(subject.api.fill(20_000) for _ in range(200)))
        assert {len(answer) for answer in answers} == {20_000} and actor.filled == 200
        assert all_credit_is_back(asking, subject)


class Stranger:
    """Sends what it likes to a system and keeps what it is answered (``wire.Listener``)."""

    def __init__(self) -> None:
        self.answers: list[list[envelopes.Envelope]] = []
        self.header = b""
        self.replies: list[int] = []
        self.marks: list[int] = []
        self.reads = False
        """Confirms what it receives."""

    def received(self, link: Link, header: codec.Bytes, body: codec.Bytes, buffers: Frames) -> None:
        self.answers.append(codec.unpack_envelopes(body, buffers))
        for kind, number, *_ in self.answers[-1]:
            if kind == Kind.REPLY:
                self.replies.append(number)
            elif kind == Kind.PING:
                self.marks.append(number)
                if self.reads:
                    link.send(packed(Kind.PONG, number, []))

    def connected(self, link: Link) -> None: ...

    def disconnected(self, link: Link, reason: str) -> None: ...

    def refused(self, link: Link, reason: str) -> None: ...

    def crashed(self) -> None: ...


def packed(*envelope: object) -> bytes:
    return codec.Encoder().pack(envelope)


HEADER = codec.pack_header("stranger", 1)
RUBBISH = {
    "another version": (packed(envelopes.MAGIC, envelopes.VERSION + 1, "stranger", 1), packed(Kind.BYE, 0)),
    "no header": (b"", packed(Kind.BYE, 0)),
    "no MessagePack": (b"\xc1", b"\xc1"),
    "an envelope of no kind": (HEADER, packed(99, 1)),
    "a call without its fields": (HEADER, packed(Kind.CALL, 1)),
    "no envelope": (HEADER, codec.Encoder().pack({"a": 1})),
    "a list cut short": (HEADER, b"\xdd\xff\xff\xff\xff"),
    "an invalid timeout": (HEADER, packed(Kind.CALL, 1, "subject", "hear", float("nan"), [1], {}, 1)),
    "invalid ids": (HEADER, packed(Kind.PONG, 1, [[1]])),
    "invalid ranges": (HEADER, packed(Kind.DONE, 0, ["x"])),
}


class TestRubbish:
    @over_every_transport
    async def test_its_sender_gets_an_error_and_the_others_notice_nothing(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster)
        pending = asyncio.ensure_future(subject.api.hang())
        await until(lambda: actor.hanging == 1)
        for header, body in RUBBISH.values():
            stranger = Stranger()
            async with cluster.stranger(header, stranger) as wire:
                wire.connect(subject.address).send(body)
                await until(lambda: stranger.answers)  # noqa: B023  # it is waited for within the turn
            (((kind, _, reason),),) = stranger.answers
            assert kind == Kind.REFUSE and reason
        assert await subject.api.move(Point(1)) == Point(2)
        assert not pending.done()
        pending.cancel()
        await until(lambda: all_credit_is_back(asking, subject))


def add_once(request_id: int, key: int) -> bytes:
    """An idempotent call of a stranger."""
    return packed(Kind.IDEMPOTENT_CALL, request_id, "subject", "add_once", 30.0, [key], {}, 1, 1, 0)


class TestIncarnations:
    @over_every_transport
    async def test_two_systems_of_one_name_are_both_served(self, cluster: Cluster) -> None:
        _, actor, subject = await two(cluster)
        one, other = Stranger(), Stranger()
        epochs = sorted((new_epoch(), new_epoch()))
        async with (
            cluster.stranger(codec.pack_header("twin", epochs[0]), one, "one") as wire,
            cluster.stranger(codec.pack_header("twin", epochs[1]), other, "other") as other_wire,
        ):
            link, other_link = wire.connect(subject.address), other_wire.connect(subject.address)
            for number in (1, 2, 3):
                for answers, sending, key in ((one, link, number), (other, other_link, -number)):
                    sending.send(add_once(number, key))
                    await until(lambda: len(answers.answers) == number)  # noqa: B023
                    assert answers.answers[-1] == [[Kind.REPLY, number, 1]]
        assert actor.added == dict.fromkeys((1, 2, 3, -1, -2, -3), 1)

    @over_every_transport
    async def test_a_process_that_was_replaced_is_refused(self, cluster: Cluster) -> None:
        _, actor, subject = await two(cluster)
        zombie, successor = Stranger(), Stranger()
        epoch = new_epoch()
        async with (
            cluster.stranger(codec.pack_header("worker", epoch), zombie, "zombie") as old_wire,
            cluster.stranger(codec.pack_header("worker", epoch + 1), successor, "successor") as new_wire,
        ):
            old, new = old_wire.connect(subject.address), new_wire.connect(subject.address)
            old.send(add_once(1, 1))
            old.send(packed(Kind.CALL, 2, "subject", "hang", 30.0, [], {}, 1))
            await until(lambda: zombie.answers and actor.hanging)
            new.send(add_once(1, 2))
            await until(lambda: successor.answers)
            assert actor.hanging == 0, "the call of a process that has ended is cancelled"
            old.send(packed(Kind.TELL, 3, "subject", "hear", 0.0, [1], {}, 1))
            old.send(add_once(4, 4))
            await until(lambda: len(zombie.answers) >= 2)
            (kind, _, reason) = zombie.answers[-1][0]
            assert kind == Kind.REFUSE and "worker was replaced: a later incarnation" in reason
        assert actor.heard == [] and actor.added == {1: 1, 2: 1}

    @over_every_transport
    async def test_a_system_that_starts_after_the_clock_was_set_back_is_reachable(
        self, cluster: Cluster
    ) -> None:
        asking = await cluster.start("asking", Settings(connect_timeout_s=10))
        address, now_ns = "", time.time_ns()
        for turn in range(3):
            with mock.patch.object(time, "time_ns", lambda: now_ns - turn * 3600 * 10**9):  # noqa: B023
                serving = cluster.system("serving", again_at=address)
                await serving.__aenter__()
            try:
                address = serving.address
                await serving.add(Subject(), "subject")
                subject = asking.ref("subject", address, Subject)
                assert await subject.within(10).add(turn) == 1
                assert await subject.within(10).add_once(turn) == 2
            finally:
                await serving.__aexit__(None, None, None)
            await until(lambda: asking._local.network.peer(address).session.state is LinkState.DOWN)  # noqa: B023
