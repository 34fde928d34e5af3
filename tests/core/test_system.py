"""Actors calling each other: within one process, and across real processes and sockets."""

import asyncio
import math
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import (
    LocalProtocolError,
    NotInVirtualTime,
    RemoteError,
    RemoteProtocolError,
    SystemClosed,
)
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time

from ..patience import PATIENCE_S
from .echo import Echo, Point

ECHO = "echo:Echo"


@pytest.fixture(params=["same process", "own process"])
async def echo(request: pytest.FixtureRequest, system: ActorSystem, supervisor: Supervisor) -> ActorRef[Echo]:
    """One suite, whether the actor lives here or behind a socket."""
    if request.param == "same process":
        return await system.add(Echo(), "echo")
    await supervisor.spawn(ECHO, "echo", {})
    return supervisor.reference("echo", Echo)


class TestCalls:
    async def test_arguments_and_results_keep_their_types(self, echo: ActorRef[Echo]) -> None:
        assert await echo.api.greet("world") == "hello world"
        assert await echo.api.move(Point(1, ("a", "b")), by=2) == Point(3, ("a", "b"))

    async def test_a_wrong_argument_is_named_and_the_actor_goes_on(self, echo: ActorRef[Echo]) -> None:
        with pytest.raises(RemoteProtocolError, match=r"Echo.move: point.x: .*valid integer.*\(got 'one'\)"):
            await echo.ask("move", {"x": "one"})
        with pytest.raises(RemoteProtocolError, match="point.z: Unexpected keyword argument"):
            await echo.ask("move", {"x": 1, "z": 2})
        with pytest.raises(RemoteProtocolError, match="by_how_much"):
            await echo.ask("move", {"x": 1}, by_how_much=2)
        with pytest.raises(RemoteProtocolError, match="takes 1 arguments by position, got more"):
            await echo.ask("greet", "a", "b")
        assert await echo.api.greet("world") == "hello world"

    async def test_a_result_of_the_wrong_type_is_refused_by_the_caller(self, echo: ActorRef[Echo]) -> None:
        with pytest.raises(RemoteProtocolError, match="result of Echo.wrong_result"):
            await echo.api.wrong_result()

    async def test_what_the_endpoint_raises_comes_with_its_traceback(self, echo: ActorRef[Echo]) -> None:
        with pytest.raises(RemoteError) as caught:
            await echo.api.fail("nothing here")
        assert (caught.value.kind, caught.value.endpoint) == ("KeyError", "fail")
        assert "in fail" in caught.value.remote_traceback

    async def test_a_reply_comes_whatever_the_endpoint_returns_or_raises(self, echo: ActorRef[Echo]) -> None:
        with pytest.raises(RemoteError, match=r"its result: '\\ud83d': half of a surrogate pair"):
            await echo.api.half_a_character()
        with pytest.raises(RemoteError, match=r"raised ValueError: \\ud83d"):
            await echo.api.fail_with_half_a_character()
        with pytest.raises(
            RemoteError, match=r"raised Wordless: \(no text: its __str__ raised RuntimeError\)"
        ):
            await echo.api.fail_without_words()

    async def test_half_of_a_character_is_refused_where_it_is_given(self, echo: ActorRef[Echo]) -> None:
        with pytest.raises(LocalProtocolError, match=r"arguments of .*\.greet: \[0\] is 'a\\ud83d': half of"):
            await echo.ask("greet", "a\ud83d")
        with pytest.raises(LocalProtocolError, match=r"names of actors and endpoints: .*'gr\\ud83d'"):
            await echo.ask("gr\ud83d")
        assert await echo.api.greet("world") == "hello world"

    @pytest.mark.parametrize("name", ["not_an_endpoint", "on_start", "__init__", "nowhere"])
    async def test_only_endpoints_can_be_called(self, echo: ActorRef[Echo], name: str) -> None:
        with pytest.raises(RemoteProtocolError, match="has no endpoint"):
            await echo.ask(name)


class TestDeadlines:
    @pytest.mark.parametrize("timeout_s", [-1.0, math.nan])
    async def test_what_is_no_time_is_refused_before_anything_is_sent(
        self, echo: ActorRef[Echo], timeout_s: float
    ) -> None:
        with pytest.raises(ValueError, match="timeout_s must not be negative"):
            echo.within(timeout_s)
        with pytest.raises(ValueError, match="timeout_s must not be negative"):
            await echo.ask("greet", "you", timeout_s=timeout_s)
        with pytest.raises(ValueError, match="timeout_s must not be negative"):
            echo.tell("greet", "you", timeout_s=timeout_s)


async def wait_until(read: Any, expected: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await read() != expected:
            await asyncio.sleep(0)


class TestReferences:
    async def test_a_reference_in_a_message_works_where_it_arrives(self, supervisor: Supervisor) -> None:
        await asyncio.gather(
            supervisor.spawn(ECHO, "one", {"greeting": "good morning"}), supervisor.spawn(ECHO, "two", {})
        )
        one, two = supervisor.reference("one", Echo), supervisor.reference("two", Echo)
        assert await two.api.greet_through(one, "world") == "good morning world"

    async def test_a_reference_without_a_system_says_so(self) -> None:
        with pytest.raises(LocalProtocolError, match="belongs to no actor system"):
            await ActorRef[Echo]("echo", "ipc:///nowhere").api.greet("x")


class TestSystem:
    async def test_names_are_unique(self, system: ActorSystem) -> None:
        await system.add(Echo(), "echo")
        with pytest.raises(ValueError, match="already has an actor named 'echo'"):
            await system.add(Echo(), "echo")

    @pytest.mark.parametrize("ticks", [0, 1, 10])
    async def test_closing_fails_the_calls_in_flight(self, private: Path, ticks: int) -> None:
        async with ActorSystem("closing", private) as closing:
            ref = await closing.add(Echo(), "echo")
            call = asyncio.ensure_future(ref.ask("hang"))
            for _ in range(ticks):
                await asyncio.sleep(0)
        with pytest.raises(SystemClosed):
            await call
        with pytest.raises(SystemClosed):
            await ref.ask("greet", "x")

    async def test_closing_goes_on_after_an_on_stop_that_raises(self, private: Path) -> None:
        stopped: list[str] = []

        class Stops(Echo):
            async def on_stop(self) -> None:
                stopped.append(self.ref.name)
                if self.ref.name != "good":
                    raise OSError(f"{self.ref.name} failed")

        async def close(error: Exception | None) -> None:
            async with ActorSystem("closing", private) as closing:
                for name in ("bad", "good", "worse"):
                    ref = await closing.add(Stops(), name)
                call = asyncio.ensure_future(ref.ask("hang"))
                await asyncio.sleep(0)
                if error is not None:
                    call.cancel()
                    raise error
            with pytest.raises(SystemClosed):
                await call

        with structlog.testing.capture_logs() as logs, pytest.raises(OSError, match="worse failed"):
            await close(None)
        assert stopped == ["worse", "good", "bad"], "the newest first"
        assert [line["actor"] for line in logs if line["event"] == "on_stop failed"] == ["worse", "bad"]
        assert list(private.iterdir()) == [], "the socket is gone"
        with pytest.raises(ValueError, match="the body's own"):
            await close(ValueError("the body's own"))

    async def test_closing_does_not_wait_for_ever_and_says_for_what_it_did(
        self, private: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("flexmarl.core.supervision.local_actors.CLOSE_GRACE_S", 0.5)
        release = asyncio.Event()

        class Clings(Echo):
            @endpoint
            async def cling(self) -> None:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    await release.wait()

            async def on_stop(self) -> None:
                await asyncio.Event().wait()

        with structlog.testing.capture_logs() as logs:
            async with asyncio.timeout(PATIENCE_S), ActorSystem("closing", private) as closing:
                ref = await closing.add(Clings(), "clings")
                await ref.tell("cling")
                await wait_until(lambda: ref.ask("calls_hanging"), 0)
        late = [line["task"] for line in logs if line["event"] == "did not end in time"]
        assert late == ["clings.cling", "clings.on_stop"]
        release.set()
        async with asyncio.timeout(PATIENCE_S):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)

    async def test_the_first_background_failure_is_told_and_the_others_are_logged(
        self, private: Path
    ) -> None:
        async def fail(words: str) -> None:
            raise RuntimeError(words)

        with structlog.testing.capture_logs() as logs:
            async with ActorSystem("failing", private) as failing:
                actor = Echo()
                await failing.add(actor, "echo")
                for words in ("one", "two"):
                    actor.background(fail(words), words)
                assert str(await failing.failure) == "one"
                await asyncio.sleep(0)
        (line,) = (line for line in logs if line["event"] == "background work failed")
        assert line["task"] == "Echo.two" and "RuntimeError: two" in line["error"]

    async def test_background_work_that_fails_ends_a_start_that_waits(self, private: Path) -> None:
        async def fail() -> None:
            raise RuntimeError("nothing to wait for")

        class Waits(Actor):
            async def on_start(self) -> None:
                self.background(fail(), "fail")
                await asyncio.Event().wait()

        async with asyncio.timeout(PATIENCE_S), ActorSystem("starting", private) as starting:
            with pytest.raises(RuntimeError, match="nothing to wait for"):
                await starting.add(Waits(), "waits")

    async def test_a_timeout_of_a_start_stays_a_timeout(self, private: Path) -> None:
        class Late(Actor):
            async def on_start(self) -> None:
                raise TimeoutError("too late")

        async with ActorSystem("starting", private) as starting:
            with pytest.raises(TimeoutError, match="too late"):
                await starting.add(Late(), "late")

    async def test_starting_and_stopping_leaves_no_descriptor(self, private: Path) -> None:
        async def once() -> None:
            async with ActorSystem("again", private) as system:
                await (await system.add(Echo(), "echo")).ask("greet", "x")

        await once()
        before = psutil.Process().num_fds()
        for _ in range(20):
            await once()
        async with asyncio.timeout(PATIENCE_S):  # libzmq closes some in a thread of its own
            while psutil.Process().num_fds() > before:
                await asyncio.sleep(0.01)
        assert list(private.iterdir()) == []


BAD_NAMES = ["", ".", "../x", "a/b", "a\x00b", "a b", "x" * 65, ".hidden", 5, None]


class TestNames:
    @pytest.mark.parametrize("name", BAD_NAMES)
    async def test_what_can_not_be_part_of_a_file_name_is_none(self, system: ActorSystem, name: Any) -> None:
        with pytest.raises(ValueError, match="invalid name"):
            ActorSystem(name)
        with pytest.raises(ValueError, match="invalid name"):
            await system.add(Echo(), name)
        for process in (True, False):
            with pytest.raises(ValueError, match="invalid name"):
                await system.spawn(Echo, name, process=process)

    async def test_an_address_that_is_in_use_is_not_taken_away(self, private: Path) -> None:
        async with ActorSystem("x", private) as first:
            await first.add(Echo(), "echo")
            with pytest.raises(OSError, match="another system does"):
                async with ActorSystem("x", private):
                    pass
            async with ActorSystem("y", private) as other:
                assert await other.ref("echo", first.address, Echo).api.greet("you") == "hello you"
                with pytest.raises(ValueError, match="already has"):
                    await other.spawn(Echo, "y", process=True)


class Bystander(Actor):
    stopped = False

    async def on_stop(self) -> None:
        self.stopped = True


class Suicidal(Actor):
    @endpoint
    async def leave(self) -> None:
        await self.system.remove(self.ref.name)


class SpoiltEnd(Actor):
    async def on_stop(self) -> None:
        raise RuntimeError("bad end")


class TestEnds:
    async def test_nothing_is_started_before_or_after(self, private: Path) -> None:
        system = ActorSystem("x", private)
        with pytest.raises(SystemClosed, match="has not been entered"):
            await system.add(Echo(), "echo")
        async with system:
            pass
        for start in (
            lambda: system.add(Echo(), "echo"),
            lambda: system.spawn(Echo, "echo", process=True),
            lambda: system.lookup("echo", Echo),
            lambda: system.connect(system.address),
            lambda: system.__aenter__(),
        ):
            with pytest.raises(SystemClosed):
                await start()

    async def test_an_on_stop_that_raises_keeps_nobody_from_stopping(self, private: Path) -> None:
        bystander = Bystander()
        with pytest.raises(KeyError, match="the service's own"):
            async with ActorSystem("x", private) as system:
                await system.add(bystander, "bystander")
                await system.spawn(SpoiltEnd, "spoilt")
                raise KeyError("the service's own")
        assert bystander.stopped and len(asyncio.all_tasks()) == 1

    async def test_an_actor_can_not_remove_itself(self, system: ActorSystem) -> None:
        ref = await system.add(Suicidal(), "suicidal")
        with pytest.raises(RemoteError, match="can't remove itself: let another one do it"):
            await ref.api.leave()
        await system.remove("suicidal")


user: ContextVar[str] = ContextVar("user", default="nobody")


class Curious(Actor):
    @endpoint
    async def whom(self) -> str:
        return user.get()

    @endpoint
    async def at_length(self) -> None:
        raise ValueError("x" * 40_000_000)


class TestContext:
    async def test_a_handler_sees_nobody_elses_variables(self, system: ActorSystem) -> None:
        ref = await system.add(Curious(), "curious")
        user.set("alice")
        assert await asyncio.gather(*(ref.api.whom() for _ in range(3))) == ["nobody"] * 3

    async def test_words_without_end_are_cut(self, system: ActorSystem) -> None:
        ref = await system.add(Curious(), "curious")
        with pytest.raises(RemoteError, match="ValueError: xxx") as caught:
            await ref.within(PATIENCE_S).at_length()
        assert len(str(caught.value)) < 200_000


@pytest.mark.parametrize("kind", ["an unknown endpoint", "a wrong argument"])
async def test_a_one_way_message_that_is_refused_is_logged(system: ActorSystem, kind: str) -> None:
    ref = await system.add(Echo(), "echo")
    with structlog.testing.capture_logs() as lines:
        await ref.tell(*(("nothing",) if kind == "an unknown endpoint" else ("hear", "no number")))
        await ref.api.greet("you")
    assert [(line["event"], line["actor"]) for line in lines] == [("one-way message refused", "echo")]


def test_an_endpoint_is_an_async_method_with_named_parameters() -> None:
    with pytest.raises(TypeError, match="plain: an endpoint is an async method"):

        @endpoint
        def plain(self: Any) -> int:
            return 1

    with pytest.raises(TypeError, match=r"spread: an endpoint names each of its parameters, \*args"):

        @endpoint
        async def spread(self: Any, *args: int) -> int:
            return 1


def test_a_system_of_sockets_in_virtual_time_says_so() -> None:
    async def main() -> None:
        async with ActorSystem("x"):
            pass

    with pytest.raises(NotInVirtualTime):
        virtual_time.run(main())


class TestFace:
    def test_users_see_what_is_theirs(self) -> None:
        shown = {name for name in dir(ActorSystem) if not name.startswith("_")}
        assert shown == {
            "add", "address", "allow", "clock", "connect", "failure", "incarnation", "keys_file", "lookup", "new_id",
            "process_statistics", "ref", "remove", "run_blocking", "spans", "spawn",
        }  # fmt: skip

    async def test_its_repr_says_the_state(self, private: Path) -> None:
        system = ActorSystem("shown", private)
        assert repr(system) == "<ActorSystem shown: not entered>"
        async with system:
            await system.add(Echo(), "echo")
            assert repr(system) == f"<ActorSystem shown at {system.address}: running, 1 actors, 0 peers>"
        assert repr(system).endswith(": closed, 0 actors, 0 peers>")

    async def test_the_repr_of_a_supervisor_says_the_state(self, supervisor: Supervisor) -> None:
        await supervisor.spawn(Echo, "echo", process=False)
        assert repr(supervisor) == "<Supervisor supervisor: 1 of 1 actors run, running>"
        await supervisor.stop_all()
        assert repr(supervisor) == "<Supervisor supervisor: 0 of 1 actors run, stopping>"
