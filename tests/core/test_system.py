"""Actors calling each other: within one process, and across real processes and sockets."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
import zmq

from flexmarl.core.actor import endpoint
from flexmarl.core.errors import (
    ActorDead,
    ActorFailed,
    CallTimeout,
    LocalProtocolError,
    RemoteError,
    RemoteProtocolError,
    SystemClosed,
)
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervisor import Supervisor
from flexmarl.core.system import ActorSystem

from .echo import Echo, Point

ECHO = "echo:Echo"
RUBBISH = ([b""], [b"rubbish", b"\xc1"], [b"a", b"b", b"c"], [b"\x93\xa8flexmarl\x63\xa1x", b"\x90"])


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
        with pytest.raises(
            RemoteError, match=r"Echo.move: point.x: .*valid integer.*\(got 'one'\)"
        ) as caught:
            await echo.ask("move", {"x": "one"})
        assert caught.value.kind == "RemoteProtocolError"
        with pytest.raises(RemoteError, match="point.z: Unexpected keyword argument"):
            await echo.ask("move", {"x": 1, "z": 2})
        with pytest.raises(RemoteError, match="by_how_much"):
            await echo.ask("move", {"x": 1}, by_how_much=2)
        with pytest.raises(RemoteError, match="takes 1 arguments, got 2"):
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
        assert await echo.api.half_a_character() == r"\ud83d"
        with pytest.raises(RemoteError, match=r"raised ValueError: \\ud83d"):
            await echo.api.fail_with_half_a_character()
        with pytest.raises(RemoteError, match=r"raised Wordless: \(its text can't be had: RuntimeError\)"):
            await echo.api.fail_without_words()

    @pytest.mark.parametrize("name", ["not_an_endpoint", "on_start", "__init__", "nowhere"])
    async def test_only_endpoints_can_be_called(self, echo: ActorRef[Echo], name: str) -> None:
        with pytest.raises(RemoteError, match="has no endpoint"):
            await echo.ask(name)

    async def test_an_unknown_actor_is_named(self, echo: ActorRef[Echo], system: ActorSystem) -> None:
        with pytest.raises(RemoteError, match="actor nobody died: .* has no actor of that name"):
            await system.ref("nobody", echo.address).ask("greet", "x")

    async def test_a_value_that_is_no_plain_data_is_refused_before_it_is_sent(
        self, echo: ActorRef[Echo]
    ) -> None:
        with pytest.raises(LocalProtocolError, match=r"builtins.object can't be sent"):
            await echo.ask("greet", object())

    async def test_one_way_messages_arrive_in_order(self, echo: ActorRef[Echo]) -> None:
        for number in range(500):
            echo.tell("hear", number)
        assert await echo.api.all_heard() == list(range(500))

    async def test_a_thousand_calls_in_flight(self, echo: ActorRef[Echo]) -> None:
        answers = await asyncio.gather(*(echo.api.move(Point(n)) for n in range(1000)))
        assert [answer.x for answer in answers] == list(range(1, 1001))


class TestDeadlines:
    async def test_an_expired_call_names_actor_endpoint_and_deadline(self, echo: ActorRef[Echo]) -> None:
        with pytest.raises(CallTimeout, match=r"echo.hang: no answer within 0.05 s"):
            await echo.within(0.05).hang()
        await wait_until(lambda: echo.api.calls_hanging(), 0)

    async def test_cancelling_a_call_reaches_the_callee(self, echo: ActorRef[Echo]) -> None:
        call = asyncio.ensure_future(echo.api.hang())
        await wait_until(lambda: echo.api.calls_hanging(), 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await wait_until(lambda: echo.api.calls_hanging(), 0)


async def wait_until(read: Any, expected: object) -> None:
    async with asyncio.timeout(5):
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


class TestDeath:
    @pytest.mark.parametrize(("number", "how"), [(signal.SIGKILL, "signal 9"), (signal.SIGTERM, "signal 15")])
    async def test_a_kill_fails_the_calls_in_flight_at_once(
        self, supervisor: Supervisor, number: signal.Signals, how: str
    ) -> None:
        await supervisor.spawn(ECHO, "echo", {})
        echo = supervisor.reference("echo", Echo)
        calls = [asyncio.ensure_future(echo.api.hang()) for _ in range(100)]
        pid = (await supervisor.statistics())["echo"].pid
        os.kill(pid, number)
        began = time.monotonic()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - began < 5
        assert all(isinstance(r, ActorDead) and how in str(r) and r.actor == "echo" for r in results)
        with pytest.raises(ActorDead):
            await supervisor.wait_for_death()
        with pytest.raises(ActorDead):
            await echo.api.greet("late")

    async def test_an_exit_is_a_death_with_its_status(self, supervisor: Supervisor) -> None:
        await supervisor.spawn(ECHO, "echo", {})
        with pytest.raises(ActorDead, match="exit status 3"):
            await supervisor.reference("echo", Echo).api.exit(3)

    async def test_failed_background_work_ends_the_actor_and_says_why(self, supervisor: Supervisor) -> None:
        await supervisor.spawn(ECHO, "echo", {})
        await supervisor.reference("echo", Echo).api.crash_in_background()
        with pytest.raises(
            ActorFailed, match="actor echo failed: RuntimeError: background work failed"
        ) as caught:
            await supervisor.wait_for_death()
        assert "in crash" in caught.value.remote_traceback

    @pytest.mark.parametrize(
        ("actor_class", "kwargs", "message"),
        [
            ("echo:RefusesToStart", {}, "ValueError: nothing to serve"),
            ("echo:RefusesWithoutWords", {}, "Wordless: .*its text can't be had"),
            (ECHO, {"greeting": ["no", "text"]}, "greeting: .*valid string"),
            (ECHO, {"volume": 3}, "volume: Extra inputs"),
            ("echo:Point", {}, "no Actor"),
            ("nowhere:Echo", {}, "No module named 'nowhere'"),
        ],
    )
    async def test_an_actor_that_does_not_start_says_why(
        self, supervisor: Supervisor, actor_class: str, kwargs: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ActorFailed, match=message):
            await supervisor.spawn(actor_class, "echo", kwargs)

    async def test_the_first_failure_told_counts_though_another_process_ends_before(
        self, supervisor: Supervisor
    ) -> None:
        await asyncio.gather(supervisor.spawn(ECHO, "cause", {}), supervisor.spawn(ECHO, "consequence", {}))
        await supervisor.ref.ask("failed", "cause", "ValueError: it began here", "a traceback")
        with pytest.raises(ActorDead, match="exit status 1"):
            await supervisor.reference("consequence", Echo).api.exit(1)
        with pytest.raises(ActorFailed, match="actor cause failed: ValueError: it began here"):
            await supervisor.wait_for_death()

    async def test_a_death_shows_the_end_of_its_log_but_not_all_of_a_huge_one(
        self, supervisor: Supervisor, tmp_path: Path
    ) -> None:
        await supervisor.spawn(ECHO, "echo", {})
        with (tmp_path / "echo.log").open("a") as log:
            log.write("x" * 10**6 + "\nlast words\n")
        with pytest.raises(ActorDead, match=r"echo\.log:\nx+\nlast words$") as caught:
            await supervisor.reference("echo", Echo).api.exit(3)
        assert len(str(caught.value)) < 2**16 + 1000

    async def test_a_death_is_noticed_though_its_log_is_gone(
        self, supervisor: Supervisor, tmp_path: Path
    ) -> None:
        await supervisor.spawn(ECHO, "echo", {})
        (tmp_path / "echo.log").unlink()
        with pytest.raises(ActorDead, match="exit status 3\nIts log can't be read: .*echo.log"):
            await supervisor.reference("echo", Echo).api.exit(3)
        with pytest.raises(ActorDead):
            await asyncio.wait_for(supervisor.wait_for_death(), 5)

    async def test_stopping_leaves_no_process_and_no_socket(
        self, system: ActorSystem, private: Path, tmp_path: Path
    ) -> None:
        environment = {
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parents[2] / "scripts" / "src"), str(Path(__file__).parent)]
            )
        }
        async with Supervisor(system, private, tmp_path, environment) as supervisor:
            await asyncio.gather(*(supervisor.spawn(ECHO, f"echo-{n}", {}) for n in range(3)))
            pids = [
                figures.pid
                for name, figures in (await supervisor.statistics()).items()
                if name != system.name
            ]
            os.kill(pids[0], signal.SIGSTOP)  # deaf to every request: only SIGKILL ends it
        assert len(pids) == 3 and not any(psutil.pid_exists(pid) for pid in pids)
        assert [path.name for path in private.iterdir() if "echo-0" not in path.name] == ["tests.sock"]

    async def test_orphans_end_and_clean_up_when_their_parent_is_killed(self, tmp_path: Path) -> None:
        maker = Path(__file__).parent / "orphan_maker.py"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(maker), str(tmp_path)),
            env={"PYTHONPATH": str(maker.parents[2] / "scripts" / "src")},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        pid, directory = (await asyncio.wait_for(process.stderr.readline(), 30)).decode().split()
        child = psutil.Process(int(pid))
        process.kill()
        await process.wait()
        await asyncio.to_thread(child.wait, 10)
        assert not Path(directory).exists()


class TestSystem:
    async def test_names_are_unique(self, system: ActorSystem) -> None:
        await system.add(Echo(), "echo")
        with pytest.raises(ValueError, match="already has an actor named 'echo'"):
            await system.add(Echo(), "echo")

    async def test_closing_fails_the_calls_in_flight(self, private: Path) -> None:
        async with ActorSystem("closing", private) as closing:
            ref = await closing.add(Echo(), "echo")
            call = asyncio.ensure_future(ref.ask("hang"))
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
        monkeypatch.setattr("flexmarl.core.system._CLOSE_GRACE_S", 0.05)
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
            async with asyncio.timeout(5), ActorSystem("closing", private) as closing:
                ref = await closing.add(Clings(), "clings")
                ref.tell("cling")
                await wait_until(lambda: ref.ask("calls_hanging"), 0)
        late = [line["task"] for line in logs if line["event"] == "did not end in time"]
        assert late == ["clings.cling", "clings.on_stop"]
        release.set()
        async with asyncio.timeout(5):
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

    async def test_rubbish_on_the_socket_harms_nobody(self, system: ActorSystem) -> None:
        ref = await system.add(Echo(), "echo")
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(system.address)
            for frames in (
                [b""],
                [b"rubbish", b"\xc1"],
                [b"a", b"b", b"c"],
                [b"\x93\xa8flexmarl\x63\xa1x", b"\x90"],
            ):
                dealer.send_multipart(frames)
            await asyncio.to_thread(time.sleep, 0.05)  # their way through ZeroMQ's own threads has no event
            assert await ref.ask("greet", "world") == "hello world"

    async def test_starting_and_stopping_leaves_no_descriptor(self, private: Path) -> None:
        async def once() -> None:
            async with ActorSystem("again", private) as system:
                await (await system.add(Echo(), "echo")).ask("greet", "x")

        await once()
        before = psutil.Process().num_fds()
        for _ in range(20):
            await once()
        assert psutil.Process().num_fds() <= before
        assert list(private.iterdir()) == []
