"""The runtime's contract for calls as users write them: sent when they are made, and awaited in any way of asyncio."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from flexmarl.core.errors import (
    ActorDead,
    CallTimeout,
    LocalProtocolError,
    RemoteError,
    RemoteProtocolError,
    SystemClosed,
)
from flexmarl.core.protocol.session import Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem

from ..patience import PATIENCE_S
from .clusters import Cluster, over_every_transport, until
from .pairs import all_credit_is_back, session_of, two
from .runtime_actors import Point, Refused, Subject

SMALL = Settings(window_requests=4)

# A call that hangs outlives it.
SOON_S = 0.05


@contextmanager
def tasks_made() -> Iterator[list[asyncio.Task[Any]]]:
    """The tasks that were made, complete at its end, without those of handlers, which have their actor's name."""
    loop = asyncio.get_running_loop()
    made: list[asyncio.Task[Any]] = []
    before = loop.get_task_factory()

    def make(on: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=on, **options)
        made.append(task)
        return task

    loop.set_task_factory(make)
    try:
        yield made
    finally:
        loop.set_task_factory(before)
        made[:] = [task for task in made if not task.get_name().startswith("subject")]


@contextmanager
def reports() -> Iterator[list[dict[str, Any]]]:
    """The reports of the event loop about errors that no code has seen."""
    loop = asyncio.get_running_loop()
    seen: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: seen.append(context))
    try:
        yield seen
    finally:
        loop.set_exception_handler(None)


async def filled(
    cluster: Cluster, settings: Settings = SMALL
) -> tuple[ActorSystem, Subject, ActorRef[Subject]]:
    """An actor that works on a whole window of messages until its gate is opened."""
    asking, actor, subject = await two(cluster, settings)
    actor.gate.clear()
    for number in range(settings.window_requests):
        await subject.tell("hear_slowly", number)
    await until(lambda: len(actor.began) == settings.window_requests)
    return asking, actor, subject


class TestSending:
    @over_every_transport
    async def test_calls_leave_when_they_are_made_in_the_order_of_the_program(self, cluster: Cluster) -> None:
        _, actor, subject = await two(cluster)
        late = subject.api.hear(0)
        told = subject.tell("hear", 1)
        asked = subject.ask("hear", 2)
        other = subject.within(5.0).hear(3)
        await subject.api.hear(4)
        assert actor.heard == [0, 1, 2, 3, 4]
        await asyncio.gather(late, told, asked, other)
        assert actor.heard == [0, 1, 2, 3, 4]

    @over_every_transport
    async def test_a_call_is_served_although_it_is_not_awaited(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster)
        with reports() as seen:
            subject.api.hear(1)  # type: ignore[unused-coroutine]
            subject.tell("hear", 2)
            await until(lambda: actor.heard == [1, 2])
            await until(lambda: all_credit_is_back(asking, subject))
            gc.collect()
        assert seen == []

    @over_every_transport
    async def test_the_loop_reports_the_error_of_a_call_that_is_not_awaited(self, cluster: Cluster) -> None:
        asking, _, subject = await two(cluster)
        with reports() as seen:
            subject.api.fail("oh")  # type: ignore[unused-coroutine]
            await until(lambda: session_of(asking).requests == 1 and all_credit_is_back(asking, subject))
            gc.collect()
        (report,) = seen
        assert isinstance(report["exception"], RemoteError) and "never retrieved" in report["message"]

    @over_every_transport
    async def test_arguments_are_those_of_the_moment_of_the_call(self, cluster: Cluster) -> None:
        _, actor, subject = await filled(cluster)
        labels = ["early"]
        waits = subject.ask("move", {"x": 1, "labels": labels})
        labels.append("late")
        actor.gate.set()
        assert await waits == Point(2, ("early",))

    @over_every_transport
    async def test_errors_of_sending_are_raised_where_the_call_is_awaited(self, cluster: Cluster) -> None:
        asking, _, subject = await two(cluster)
        bad = subject.ask("hear", object())
        bad_tell = subject.tell("hear", object())
        good = subject.api.move(Point(1))
        for call in (bad, bad_tell):
            with pytest.raises(LocalProtocolError, match=r"arguments of subject.hear: .*can't be sent"):
                await call
        assert await good == Point(2)
        lost: ActorRef[Subject] = ActorRef("subject", subject.address)
        calls = [lost.ask("hear", 1), lost.api.hear(1), lost.tell("hear", 1)]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, LocalProtocolError) and "belongs to no actor system" in str(error)
        assert all_credit_is_back(asking, subject)


class TestAwaiting:
    @over_every_transport
    async def test_gather_wait_for_and_shield_need_no_task(self, cluster: Cluster) -> None:
        _, _, subject = await two(cluster)
        await subject.api.move(Point(0))
        with tasks_made() as made:
            answers = await asyncio.gather(*(subject.api.move(Point(number)) for number in range(50)))
            assert [answer.x for answer in answers] == list(range(1, 51))
            assert await asyncio.wait_for(subject.api.move(Point(1)), PATIENCE_S) == Point(2)
            assert await asyncio.shield(subject.api.move(Point(1))) == Point(2)
            assert await asyncio.ensure_future(subject.api.move(Point(1))) == Point(2)
            await asyncio.gather(*(subject.tell("hear", number) for number in range(5)))
            for earliest in asyncio.as_completed([subject.api.move(Point(1))]):
                waiting = earliest  # as_completed's own coroutine
                assert await waiting == Point(2)
        assert made == []

    @over_every_transport
    async def test_create_task_and_task_groups_take_it(self, cluster: Cluster) -> None:
        _, _, subject = await two(cluster)
        task = asyncio.create_task(subject.api.move(Point(1)))
        told = asyncio.create_task(subject.tell("hear", 1))
        async with asyncio.TaskGroup() as group:
            grouped = [group.create_task(subject.api.move(Point(number))) for number in range(20)]
        done, _ = await asyncio.wait([task, told])
        assert done == {task, told} and task.result() == Point(2)
        assert [each.result().x for each in grouped] == list(range(1, 21))
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                hangs = group.create_task(subject.api.hang())
                group.create_task(subject.api.fail("oh"))
        assert isinstance(caught.value.exceptions[0], RemoteError) and hangs.cancelled()

    @over_every_transport
    async def test_it_can_be_awaited_again_and_by_several(self, cluster: Cluster) -> None:
        _, _, subject = await two(cluster)
        call = subject.ask("add", 1)

        async def result() -> Any:
            return await call

        assert list(await asyncio.gather(result(), result(), call)) == [1, 1, 1]
        assert await call == 1

    @over_every_transport
    async def test_gather_collects_the_errors_of_its_calls(self, cluster: Cluster) -> None:
        asking, _, subject = await two(cluster)
        dead = asking.ref("missing", subject.address, Subject)
        errors = await asyncio.gather(
            subject.api.fail("oh"),
            subject.api.refuse(3),
            dead.api.move(Point(1)),
            subject.ask("move", "no point"),
            subject.within(0.05).hang(),
            subject.api.wrong_result(),
            return_exceptions=True,
        )
        kinds = [RemoteError, Refused, ActorDead, RemoteProtocolError, CallTimeout, RemoteProtocolError]
        assert [type(error) for error in errors] == kinds
        refused, wrong = errors[1], errors[5]
        assert isinstance(refused, Refused) and isinstance(refused.__cause__, RemoteError)
        assert "result of Subject.wrong_result" in str(wrong)
        await until(lambda: all_credit_is_back(asking, subject))

    @over_every_transport
    async def test_the_traceback_shows_the_awaiting_line(self, cluster: Cluster) -> None:
        _, _, subject = await two(cluster)

        async def awaits_it() -> None:
            await subject.api.refuse(3)

        with pytest.raises(Refused) as caught:
            await awaits_it()
        assert "awaits_it" in [entry.name for entry in caught.traceback]


class TestCancelling:
    @over_every_transport
    async def test_it_reaches_the_callee_however_it_happens(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster)

        async def awaits() -> None:
            await subject.api.hang()

        call: Any = subject.api.hang()
        waits_for = asyncio.create_task(asyncio.wait_for(subject.api.hang(), PATIENCE_S))
        gathered: Any = asyncio.gather(*(subject.api.hang() for _ in range(3)))
        tasks = [asyncio.create_task(subject.api.hang()), asyncio.create_task(awaits())]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(subject.api.hang(), SOON_S)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SOON_S):
                await subject.api.hang()
        await until(lambda: actor.hanging == 7)
        for each in (call, waits_for, gathered, *tasks):
            assert each.cancel()
        for each in (call, waits_for, gathered, *tasks):
            with pytest.raises(asyncio.CancelledError):
                await each
        await until(lambda: actor.hanging == 0)
        await until(lambda: all_credit_is_back(asking, subject))
        assert not subject.ask("move", Point(1)).cancelled()

    @over_every_transport
    async def test_a_task_that_is_cancelled_before_its_first_step_cancels_its_call(
        self, cluster: Cluster
    ) -> None:
        asking, actor, subject = await two(cluster)
        task = asyncio.create_task(subject.api.hang())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        closed: Any = subject.api.hang()
        closed.close()
        assert closed.cancelled()
        await until(lambda: session_of(asking).requests == 2 and all_credit_is_back(asking, subject))
        assert actor.hanging == 0

    @over_every_transport
    async def test_one_cancelled_call_leaves_the_others_alone(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster)
        actor.gate.clear()
        calls = [asyncio.create_task(subject.api.take(b"x" * size)) for size in range(10)]
        await until(lambda: session_of(asking).in_flight == 10)
        calls[3].cancel()
        actor.gate.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results.pop(3), asyncio.CancelledError)
        assert results == [0, 1, 2, 4, 5, 6, 7, 8, 9]


class TestCredit:
    @over_every_transport
    async def test_calls_without_credit_wait_in_order_without_a_task(self, cluster: Cluster) -> None:
        asking, actor, subject = await filled(cluster)
        with tasks_made() as made:
            calls = [subject.api.hear(100 + number) for number in range(50)]
            told = subject.tell("hear", 150)
            assert session_of(asking).waiting_for_credit == 51
            assert session_of(asking).in_flight == SMALL.window_requests
            assert not told.done()
            await asyncio.sleep(0.02)
            assert actor.heard == []
            actor.gate.set()
            await asyncio.gather(*calls, told)
            await until(lambda: len(actor.heard) == 55)
        assert made == []
        assert actor.heard == [0, 1, 2, 3, *range(100, 151)]
        await until(lambda: all_credit_is_back(asking, subject))

    @over_every_transport
    async def test_tell_suspends_only_if_credit_is_missing(self, cluster: Cluster) -> None:
        asking, actor, subject = await filled(cluster)
        waits = subject.tell("hear", 100)
        assert not waits.done()
        actor.gate.set()
        assert await waits is None
        await until(lambda: all_credit_is_back(asking, subject))
        told = subject.tell("hear", 101)
        assert told.done()
        await asyncio.wait_for(told, PATIENCE_S)
        await until(lambda: actor.heard == [0, 1, 2, 3, 100, 101])

    @over_every_transport
    async def test_many_that_wait_leave_at_once_when_a_large_message_is_done(self, cluster: Cluster) -> None:
        """Each that is sent lets the next one leave: more of them than Python's stack has frames."""
        asking, actor, subject = await two(cluster, Settings(window_bytes=2**20, window_requests=4096))
        actor.gate.clear()
        large = subject.api.take(bytes(2**20))
        await until(lambda: session_of(asking).in_flight == 1)
        calls = [subject.api.add(number) for number in range(3000)]
        assert session_of(asking).waiting_for_credit == 3000
        actor.gate.set()
        assert await large == 2**20
        assert await asyncio.gather(*calls) == [1] * 3000
        assert all_credit_is_back(asking, subject)

    @over_every_transport
    async def test_the_deadline_counts_from_the_call(self, cluster: Cluster) -> None:
        asking, actor, subject = await filled(cluster)
        quick = [subject.within(0.05).hear(100), subject.tell("hear", 101, timeout_s=0.05)]
        patient = subject.api.hear(102)
        for call in quick:
            with pytest.raises(
                CallTimeout, match=r"subject.hear: .*waiting for credit, 4 requests are under"
            ):
                await call
        hanging = subject.within(1.0).hang()
        actor.gate.set()
        with pytest.raises(CallTimeout, match=r"subject.hang: .*\(waiting for the reply\)"):
            await hanging
        await patient
        await until(lambda: all_credit_is_back(asking, subject))
        assert sorted(actor.heard) == [0, 1, 2, 3, 102]

    @over_every_transport
    async def test_cancelled_while_waiting_it_is_never_sent(self, cluster: Cluster) -> None:
        asking, actor, subject = await filled(cluster)
        calls = [asyncio.create_task(subject.api.hear(100 + number)) for number in range(10)]
        for call in calls[::2]:
            call.cancel()
        await asyncio.sleep(0)
        await until(lambda: session_of(asking).waiting_for_credit == 5)
        actor.gate.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, False] * 5
        await until(lambda: len(actor.heard) == 9)
        assert [number for number in actor.heard if number >= 100] == [101, 103, 105, 107, 109]
        await until(lambda: all_credit_is_back(asking, subject))

    @over_every_transport
    async def test_those_that_wait_fail_with_their_peer_and_with_their_system(self, cluster: Cluster) -> None:
        asking, serving = await cluster.start("asking", SMALL), cluster.system("serving", SMALL)
        async with serving:
            actor = Subject()
            await serving.add(actor, "subject")
            actor.gate.clear()
            subject = asking.ref("subject", serving.address, Subject)
            async with cluster.system("leaving", SMALL) as leaving:
                left = leaving.ref("subject", serving.address, Subject)
                lost = [left.api.take(b"") for _ in range(8)]
                await until(lambda: session_of(leaving).in_flight == 4)
            for error in await asyncio.gather(*lost, return_exceptions=True):
                assert isinstance(error, SystemClosed)
            await subject.api.move(Point(1))
            calls = [subject.api.take(b"") for _ in range(8)]
            told = subject.tell("hear", 1)
            await until(lambda: session_of(asking).waiting_for_credit == 5)
        for error in await asyncio.gather(*calls, told, return_exceptions=True):
            assert isinstance(error, ActorDead)
        await until(lambda: all_credit_is_back(asking, subject))

    @over_every_transport
    async def test_messages_that_wait_when_their_system_closes_are_carried_out(
        self, cluster: Cluster
    ) -> None:
        serving = await cluster.start("serving")
        actor = Subject()
        await serving.add(actor, "subject")
        async with cluster.system("asking", SMALL) as asking:
            subject = asking.ref("subject", serving.address, Subject)
            for number in range(100):
                subject.tell("hear", number)
            assert session_of(asking).waiting_for_credit == 96
        await until(lambda: actor.heard == list(range(100)))

    @over_every_transport
    async def test_streams_wait_too(self, cluster: Cluster) -> None:
        asking, actor, subject = await filled(cluster)
        calls = [subject.api.add_slowly(number) for number in range(10)]

        async def items() -> list[int]:
            return [item async for item in subject.api.count(3)]

        counting = asyncio.create_task(items())
        await until(lambda: session_of(asking).waiting_for_credit == 11)
        actor.gate.set()
        assert await asyncio.gather(*calls) == [1] * 10
        assert await counting == [0, 1, 2]
        await until(lambda: all_credit_is_back(asking, subject))
