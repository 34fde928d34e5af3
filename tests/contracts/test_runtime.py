"""The runtime's contract: calls between two systems and their ends, over every wire."""

import asyncio
from contextlib import suppress

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
from flexmarl.core.protocol.codec import Buffer
from flexmarl.core.protocol.session import LinkState, Settings
from flexmarl.core.ref import ActorRef

from ..patience import PATIENCE_S
from .clusters import QUICK, Cluster, over_every_transport, until
from .pairs import add_when_back, all_credit_is_back, session_of, two
from .runtime_actors import Late, MisreadSubject, Point, Refused, Subject


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
                async with asyncio.timeout(PATIENCE_S):
                    for call in (
                        subject.api.panic("oh"),
                        subject.api.panic("oh", 0.01),
                    ):
                        with pytest.raises(RemoteError, match="raised Panic: oh") as caught:
                            await call
                        assert "in panic" in caught.value.remote_traceback
                    with pytest.raises(RemoteError, match="raised Panic: no more numbers"):
                        async for _ in subject.api.count_and_panic(2):
                            pass
                    await subject.tell("panic", "oh")
                    assert await subject.api.move(Point(1)) == Point(2)
            events = [entry["event"] for entry in logs]
            assert events == ["endpoint panicked"] * 3 + ["one-way message failed"]
            requests = asking._local.network.connection(subject.address).session.requests
            await until(lambda all_open=requests: not len(all_open))  # type: ignore[misc]
            credit = requests.credit(subject.name)
            assert (credit.requests, credit.size_bytes) == (0, 0)

    @over_every_transport
    async def test_a_generator_exit_is_an_answer_like_other_errors(self, cluster: Cluster) -> None:
        asking, _, far = await two(cluster)
        near = await asking.add(Subject(), "near")
        for subject in (far, near):
            async with asyncio.timeout(PATIENCE_S):
                for call in (subject.api.close_generator(), subject.api.close_generator(0.01)):
                    with pytest.raises(RemoteError, match="raised GeneratorExit: a generator's own end"):
                        await call
                with pytest.raises(RemoteError, match="raised GeneratorExit: a generator's own end"):
                    async for _ in subject.api.count_and_close(2):
                        pass
                await subject.tell("close_generator")
                assert await subject.api.move(Point(1)) == Point(2)

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
        calls = [subject.api.move(Point(1)), subject.api.add_slowly(1), subject.api.add(2)]
        answers = asyncio.gather(*calls)
        await subject.tell("hear", 1)
        assert await answers == [Point(2), 1, 1]
        assert await subject.api.move(Point(1)) == Point(2) and actor.heard == [1]

    @over_every_transport
    async def test_a_value_that_python_can_not_hold_costs_nobody_else(self, cluster: Cluster) -> None:
        _, actor, subject = await two(cluster)
        waiting = asyncio.create_task(subject.api.hang())
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
    async def test_calls_that_take_long_are_answered_each(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster)
        assert await asyncio.gather(*(subject.api.add_slowly(key) for key in range(50))) == [1] * 50
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
            await misread.api.refuse_slowly(4)

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
    async def test_calls_that_take_long_get_it_each(self, cluster: Cluster) -> None:
        _, actor, subject = await two(cluster)
        calls = [subject.api.refuse_slowly(number) for number in range(20)]
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
        calls = [asyncio.create_task(subject.api.hang()) for _ in range(10)]
        await until(lambda: actor.hanging == 10)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        await until(lambda: actor.hanging == 0)
        await until(lambda: all_credit_is_back(asking, subject))

    @over_every_transport
    async def test_closing_a_system_fails_the_calls_to_it_at_once(self, cluster: Cluster) -> None:
        asking = await cluster.start("asking", Settings(connect_timeout_s=2.0))
        async with cluster.system("serving") as serving:
            actor = Subject()
            await serving.add(actor, "subject")
            subject = asking.ref("subject", serving.address, Subject)
            calls = [asyncio.create_task(subject.within(60).hang()) for _ in range(100)]
            await until(lambda: actor.hanging == 100)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, ActorDead) and result.actor == "subject" for result in results)
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
                assert await add_when_back(subject, turn) == 1
            connection = asking._local.network.connection(address)
            await until(lambda: asking._local.network.connection(address).session.state is LinkState.DOWN)  # noqa: B023
            assert (connection.node, connection.session.statistics().in_flight) == ("serving", 0)

    @over_every_transport
    async def test_where_nobody_listens_is_unreachable_and_nothing_is_left_over(
        self, cluster: Cluster
    ) -> None:
        asking = await cluster.start("asking", QUICK)
        nobody = asking.ref("nobody", cluster.nowhere(), Subject)
        with pytest.raises(Unreachable, match=r"no connection within 0.2 s"):
            await nobody.api.move(Point(1))
        await nobody.tell("hear", 1)
        with pytest.raises(Unreachable):
            await nobody.api.add_slowly(1)
        assert all_credit_is_back(asking, nobody)

    @over_every_transport
    async def test_what_failed_as_unreachable_is_not_carried_out_later(self, cluster: Cluster) -> None:
        async with cluster.system("serving") as serving:
            address = serving.address
        asking = await cluster.start("asking", QUICK)
        subject = asking.ref("subject", address, Subject)
        with pytest.raises(Unreachable):
            await subject.api.add(1)
        async with cluster.system("serving", again_at=address) as serving:
            actor = Subject()
            await serving.add(actor, "subject")
            async with asyncio.timeout(PATIENCE_S):
                while not actor.added:
                    with suppress(Unreachable):  # of a busy machine
                        assert await subject.api.add(2) == 1
            assert actor.added == {2: 1}
