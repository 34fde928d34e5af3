"""Actors that die: notices of deaths, restarts, files and processes that are left."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import structlog

from flexmarl.core.errors import (
    ActorDead,
    ActorFailed,
    ActorNotFound,
    FlexmarlError,
    LocalProtocolError,
    TooManyRestarts,
    Unreachable,
)
from flexmarl.core.protocol.session import Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.child_process import ChildProcess
from flexmarl.core.supervision.restart_policy import Intensity, Strategy
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.zeromq import Tcp

from ..echo import Echo, Worker

ECHO = "echo:Echo"
WORKER = "echo:Worker"
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parents[3] / "scripts" / "src"), str(Path(__file__).parents[1])]
    )
}
PATIENCE_S = 15.0


async def eventually(read: Any, accept: Any) -> Any:
    """The first result of ``read`` that ``accept`` takes."""
    async with asyncio.timeout(PATIENCE_S):
        while not accept(value := await read()):
            await asyncio.sleep(0.01)
    return value


async def test_what_an_actor_said_before_it_left_arrives_however_late_it_is_read(
    supervisor: Supervisor,
) -> None:
    await supervisor.spawn(ECHO, "echo", {})
    echo = supervisor.reference("echo", Echo)
    pid = (await supervisor.process_statistics())["echo"].pid
    last_words = asyncio.ensure_future(echo.api.leave("farewell"))
    for _ in range(3):  # it is sent
        await asyncio.sleep(0)
    while psutil.pid_exists(pid):
        time.sleep(0.01)  # noqa: ASYNC251  # blocks the loop until the process has ended
    assert await last_words == "farewell"


class TestDeath:
    @pytest.mark.parametrize(("number", "how"), [(signal.SIGKILL, "signal 9"), (signal.SIGTERM, "signal 15")])
    async def test_a_kill_fails_the_calls_in_flight_at_once(
        self, supervisor: Supervisor, number: signal.Signals, how: str
    ) -> None:
        await supervisor.spawn(ECHO, "echo", {})
        echo = supervisor.reference("echo", Echo)
        calls = [asyncio.ensure_future(echo.api.hang()) for _ in range(100)]
        pid = (await supervisor.process_statistics())["echo"].pid
        os.kill(pid, number)
        began = time.monotonic()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - began < 5
        assert all(isinstance(r, ActorDead) and how in str(r) and r.actor == "echo" for r in results)
        with pytest.raises(ActorDead):
            await supervisor.wait_failed()
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
            await supervisor.wait_failed()
        assert "in crash" in caught.value.remote_traceback

    @pytest.mark.parametrize(
        ("actor_class", "kwargs", "message"),
        [
            ("echo:RefusesToStart", {}, "ValueError: nothing to serve"),
            ("echo:RefusesWithoutWords", {}, "Wordless: .*no text"),
            (ECHO, {"greeting": ["no", "text"]}, "greeting: .*valid string"),
            (ECHO, {"volume": 3}, "volume: Extra inputs"),
            ("echo:Point", {}, "not a subclass of Actor"),
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
            await supervisor.wait_failed()

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
            await asyncio.wait_for(supervisor.wait_failed(), 5)

    async def test_stopping_leaves_no_process_and_no_socket(
        self, system: ActorSystem, private: Path, tmp_path: Path
    ) -> None:
        environment = {
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parents[3] / "scripts" / "src"), str(Path(__file__).parents[1])]
            )
        }
        async with Supervisor(system, private, tmp_path, environment) as supervisor:
            await asyncio.gather(*(supervisor.spawn(ECHO, f"echo-{n}", {}) for n in range(3)))
            pids = [
                figures.pid
                for name, figures in (await supervisor.process_statistics()).items()
                if name != system.name
            ]
            os.kill(pids[0], signal.SIGSTOP)  # deaf to every request: only SIGKILL ends it
        assert len(pids) == 3 and not any(psutil.pid_exists(pid) for pid in pids)
        assert [path.name for path in private.iterdir() if "echo-0" not in path.name] == ["tests.sock"]

    async def test_orphans_end_and_clean_up_when_their_parent_is_killed(self, tmp_path: Path) -> None:
        maker = Path(__file__).parents[1] / "orphan_maker.py"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(maker), str(tmp_path)),
            env={"PYTHONPATH": str(maker.parents[3] / "scripts" / "src")},
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


@dataclass
class Bench:
    """A system and a supervisor that restarts."""

    system: ActorSystem
    supervisor: Supervisor
    diary: Path

    async def start(
        self, name: str, *, process: bool = True, actor_class: type[Worker] | str = WORKER, **kwargs: Any
    ) -> ActorRef[Worker]:
        arguments = {"diary": str(self.diary), **kwargs}
        ref = await self.supervisor.spawn(actor_class, name, arguments, process=process)
        return self.system.ref(name, ref.address, Worker)

    def written(self) -> list[str]:
        return self.diary.read_text().splitlines()


@asynccontextmanager
async def bench(
    private: Path,
    logs: Path,
    *,
    strategy: Strategy = Strategy.ONE_FOR_ONE,
    intensity: Intensity | None = None,
    tcp: Tcp | None = None,
    settings: Settings | None = None,
) -> AsyncIterator[Bench]:
    diary = logs / "diary"
    diary.touch()
    async with (
        ActorSystem("tests", private, tcp=tcp, settings=settings or Settings()) as system,
        Supervisor(
            system, private, logs, ENVIRONMENT, strategy=strategy, intensity=intensity or Intensity(3, 60)
        ) as supervisor,
    ):
        yield Bench(system, supervisor, diary)
    assert len(asyncio.all_tasks()) == 1, "a task outlived its system"


async def fate(call: Any) -> str:
    """The class of the error that a call raises."""
    try:
        await call
    except FlexmarlError as error:
        return type(error).__name__
    return "answered"


class TestRestart:
    @pytest.mark.parametrize("tcp", [None, Tcp()], ids=["ipc", "tcp"])
    async def test_a_reference_outlives_the_process(
        self, private: Path, tmp_path: Path, tcp: Tcp | None
    ) -> None:
        async with bench(private, tmp_path, tcp=tcp) as made:
            worker = await made.start("worker")
            sibling = await made.start("sibling")
            pid = await worker.api.pid()
            calls = [asyncio.ensure_future(worker.api.hang()) for _ in range(100)]
            idempotent = asyncio.ensure_future(worker.api.answer_in_the_second_life())
            await eventually(lambda: asyncio.to_thread(made.written), lambda lines: "asked" in lines)
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.gather(*map(fate, calls)) == ["ActorDead"] * 100
            second = await eventually(lambda: pid_of(worker), lambda new: new != pid)
            assert await idempotent == second
            assert (await sibling.api.find("worker")).address == worker.address, "and others find it there"
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    async def test_calls_made_meanwhile_wait_for_the_next_incarnation(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path) as made:
            worker = await made.start("worker")
            pid = await worker.api.pid()
            in_flight = asyncio.ensure_future(worker.api.hang())
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGSTOP)  # so that no process serves the call below, with any timing
            os.kill(pid, signal.SIGKILL)
            assert await fate(in_flight) == "ActorDead"
            await eventually(lambda: asyncio.sleep(0, made.supervisor.running), lambda names: not names)
            assert await worker.api.pid() != pid

    async def test_calls_made_while_the_next_incarnation_starts_wait_for_it(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path) as made:
            gate = made.diary.with_name("gate")
            gate.touch()
            worker = await made.start("worker", actor_class="echo:SlowToStart")
            pid = await worker.api.pid()
            gate.unlink()
            os.kill(pid, signal.SIGKILL)
            assert await fate(worker.api.hang()) == "ActorDead"
            await eventually(
                lambda: asyncio.to_thread(made.written), lambda lines: lines.count("starting") == 2
            )
            call = asyncio.ensure_future(worker.api.pid())
            done, _ = await asyncio.wait([call], timeout=0.3)  # in which it would be refused
            assert not done
            gate.touch()
            assert await call != pid

    async def test_a_crash_in_the_actor_counts_like_the_death_of_its_process(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path, intensity=Intensity(1, 60)) as made:
            worker = await made.start("worker")
            pid = await worker.api.pid()
            await worker.api.crash()
            await eventually(lambda: pid_of(worker), lambda new: new not in (0, pid))
            await worker.api.crash()
            with pytest.raises(
                TooManyRestarts, match="worker died: .*restarted 1 times within 60 s.*RuntimeError"
            ) as at:
                await asyncio.wait_for(made.supervisor.wait_failed(), PATIENCE_S)
            assert isinstance(at.value.__cause__, ActorFailed)
            assert (at.value.restarts, at.value.period_s) == (1, 60)
            assert made.supervisor.find("worker") is None
            await eventually(lambda: fate(worker.api.pid()), lambda how: how == "TooManyRestarts")

    async def test_a_start_that_fails_counts_as_the_next_death(self, private: Path, tmp_path: Path) -> None:
        for process, actor_class in ((True, WORKER), (False, Worker)):
            async with bench(private, tmp_path) as made:
                made.diary.write_text("")
                worker = await made.start("worker", process=process, actor_class=actor_class, starts=1)
                await worker.api.crash()
                with pytest.raises(TooManyRestarts, match="restarted 3 times .*started once too often"):
                    await asyncio.wait_for(made.supervisor.wait_failed(), PATIENCE_S)
                assert made.written().count("start worker") == 4
                await eventually(
                    lambda ref=worker: fate(ref.api.pid()),
                    lambda how: how in ("ActorDead", "TooManyRestarts"),
                )

    async def test_an_actor_of_this_process_is_made_anew_and_serves_what_arrived_meanwhile(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path) as made:
            worker = await made.start("worker", process=False, actor_class=Worker)
            hanging = asyncio.ensure_future(worker.api.hang())
            await worker.api.crash()
            assert await fate(hanging) == "ActorDead"
            assert await worker.api.pid() == os.getpid()
            assert made.written() == ["start worker", "start worker"]
        assert made.written()[-1] == "stop worker"

    async def test_one_for_all_stops_the_newest_first_and_starts_the_oldest_first(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path, strategy=Strategy.ONE_FOR_ALL) as made:
            first = await made.start("first")
            await made.start("second", process=False, actor_class=Worker)
            await made.start("third")
            old = await first.api.pid()
            second = made.supervisor.reference("second", Worker)
            hanging = asyncio.ensure_future(second.api.hang())
            await second.api.pid()
            os.kill(old, signal.SIGKILL)
            assert await fate(hanging) == "ActorDead"
            names = ["first", "second", "third"]
            starts = [f"start {name}" for name in names]
            await eventually(lambda: asyncio.to_thread(made.written), lambda lines: len(lines) == 8)
            assert made.written() == [*starts, "stop third", "stop second", *starts]
            assert await eventually(lambda: pid_of(first), bool) != old
            assert await second.api.pid() == os.getpid()

    async def test_the_calls_of_one_for_all_end_when_nothing_is_restarted_any_more(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(
            private, tmp_path, strategy=Strategy.ONE_FOR_ALL, intensity=Intensity(2, 60)
        ) as made:
            await made.start("first")
            worker = await made.start("second", starts=1)
            local = await made.start("third", process=False, actor_class=Worker)
            await local.api.crash()
            with pytest.raises(TooManyRestarts, match="second died: .*restarted 2 times"):
                await asyncio.wait_for(made.supervisor.wait_failed(), PATIENCE_S)
            assert await fate(worker.api.pid()) == "TooManyRestarts"
            assert await fate(local.api.pid()) == "ActorDead"


async def pid_of(worker: ActorRef[Worker]) -> int:
    """0 while it is dead."""
    try:
        return await worker.api.pid()
    except ActorDead:
        return 0


class TestRemove:
    async def test_a_process_that_was_removed_leaves_nothing_and_is_dead_at_once(
        self, system: ActorSystem
    ) -> None:
        first = await system.spawn(Echo, "echo", process=True)
        await system.remove("echo")
        descriptors = psutil.Process().num_fds()
        for _ in range(3):
            assert await (await system.spawn(Echo, "echo", process=True)).api.greet("you") == "hello you"
            await system.remove("echo")
            with pytest.raises(ActorDead, match="stopped it"):
                await first.api.greet("you")
        # A socket that is closed lingers for the peer that is not there any more.
        await eventually(lambda: asyncio.to_thread(psutil.Process().num_fds), lambda now: now <= descriptors)
        again = await system.spawn(Echo, "echo", process=True)
        assert await first.api.greet("you") == await again.api.greet("you")

    async def test_linked_actors_outlive_one_that_is_stopped_in_good_order(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path) as made:
            worker, other = await made.start("worker"), await made.start("other")
            pid = await worker.api.pid()
            await worker.api.link_it(other)
            await worker.api.watch_it(other)
            await eventually(other.api.watchers, lambda count: count == 2)
            await made.supervisor.stop("other")
            deaths = await eventually(worker.api.seen, bool)
            assert deaths[0].stopped and await worker.api.pid() == pid


class TestStart:
    async def test_a_class_that_no_other_process_can_import_is_refused(
        self, system: ActorSystem, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Local(Echo): ...

        with pytest.raises(
            LocalProtocolError, match=r"Local is defined inside a function.*move it to a module"
        ):
            await system.spawn(Local, "local", process=True)
        main = type("Main", (Echo,), {"__module__": "__main__"})
        monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
        with pytest.raises(LocalProtocolError, match="Main is defined at a prompt"):
            await system.spawn(main, "main", process=True)
        assert await (await system.spawn(Local, "local")).api.greet("you") == "hello you"

    async def test_spawned_by_its_class_an_actor_inherits_where_to_import_from(
        self, system: ActorSystem
    ) -> None:
        echo = await system.spawn(Echo, "echo", {"greeting": "good morning"}, process=True)
        assert await echo.api.greet("you") == "good morning you"
        assert [number async for number in echo.api.count(2)] == [0, 1]  # the reference knows the class
        assert (system.directory / "echo.log").exists()

    async def test_a_first_start_that_fails_is_not_tried_again_and_leaves_the_name_free(
        self, system: ActorSystem
    ) -> None:
        for process in (True, False):
            with pytest.raises((ActorFailed, ValueError), match="nothing to serve"):
                await system.spawn(f"{Echo.__module__}:RefusesToStart", "echo", process=process)
            echo = await system.spawn(Echo, "echo", process=process)
            assert await echo.api.greet("you") == "hello you"
            with pytest.raises(ValueError, match="already has an actor named 'echo'"):
                await system.spawn(Echo, "echo", process=process)
            await system.remove("echo")
            with pytest.raises(ActorNotFound):
                await system.lookup("echo", Echo)
        assert not system.failure.done()

    async def test_what_is_never_ready_is_killed(
        self, private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("flexmarl.core.supervision.child_process.START_TIMEOUT_S", 0.5)
        async with bench(private, tmp_path) as made:
            before = psutil.Process().children()
            with pytest.raises(ActorDead, match=r"not ready within 0.5 s"):
                await made.supervisor.spawn("echo:NeverReady", "late", {})
            assert psutil.Process().children() == before

    async def test_a_start_that_is_given_up_leaves_no_process(self, private: Path, tmp_path: Path) -> None:
        async with bench(private, tmp_path) as made:
            starting = asyncio.create_task(made.supervisor.spawn("echo:NeverReady", "late", {}))
            await eventually(lambda: asyncio.to_thread(psutil.Process().children), bool)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert psutil.Process().children() == []
            assert (await made.start("late")).name == "late"

    async def test_nobody_waits_for_ever_for_what_outlives_sigkill(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("flexmarl.core.supervision.child_process._KILL_GRACE_S", 0.05)
        process = await ChildProcess.start(
            "stuck", [str(tmp_path), "stuck", "shared"], b"", tmp_path / "log", None
        )
        process.kill()
        with structlog.testing.capture_logs() as logs:
            await process.wait_gone()  # no watch reports its end
        assert [line["event"] for line in logs] == ["process does not end"]
        await process.wait_ended()

    async def test_restarts_that_do_not_help_set_the_failure_of_the_system(self, private: Path) -> None:
        async with ActorSystem("tests", private, intensity=Intensity(1, 60)) as system:
            echo = await system.spawn(Echo, "echo")
            for _ in range(2):
                await eventually(lambda: fate(echo.api.crash_in_background()), lambda how: how == "answered")
            failure = await asyncio.wait_for(system.failure, PATIENCE_S)
        assert isinstance(failure, TooManyRestarts) and (failure.actor, failure.restarts) == ("echo", 1)


class TestLookup:
    async def test_systems_that_ask_each_other_come_to_an_end(self, private: Path) -> None:
        async with ActorSystem("one", private) as one, ActorSystem("two", private) as two:
            await one.connect(two.address)
            await two.connect(one.address)
            await two.add(Echo(), "echo")
            assert await (await one.lookup("echo", Echo)).api.greet("you") == "hello you"
            with pytest.raises(ActorNotFound, match="nobody"):
                await one.lookup("nobody", Echo, timeout_s=5)


class TestWatch:
    async def test_each_end_is_told_once_with_its_reason(self, private: Path, tmp_path: Path) -> None:
        async with bench(private, tmp_path) as made:
            watcher = await made.start("watcher")
            killed, stopped = await made.start("killed"), await made.start("stopped")
            local = await made.start("local", process=False, actor_class=Worker)
            nobody = made.system.ref("nobody", killed.address, Worker)
            for ref in (killed, stopped, local, nobody):
                await watcher.api.watch_it(ref)
            pid = await killed.api.pid()
            for ref in (killed, stopped, local):
                await watched(ref)
            await eventually(watcher.api.seen, lambda seen: [dead.actor for dead in seen] == ["nobody"])
            os.kill(pid, signal.SIGKILL)
            await made.system.remove("stopped")
            await made.system.remove("local")
            seen = await eventually(watcher.api.seen, lambda seen: len(seen) >= 4)
            assert sorted((dead.actor, dead.stopped) for dead in seen) == [
                ("killed", False), ("local", True), ("nobody", False), ("stopped", True),
            ]  # fmt: skip
            reasons = {dead.actor: dead.reason for dead in seen}
            assert "no actor of that name" in reasons["nobody"]
            assert "ended or closed the connection" in reasons["killed"]
            assert (reasons["stopped"], reasons["local"]) == ("stopped was closed", "tests stopped it")

    async def test_a_process_that_hangs_is_dead_after_missed_heartbeats(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path, settings=Settings(heartbeat_s=0.1)) as made:
            watcher = Worker(str(made.diary))
            await made.system.add(watcher, "watcher")
            hangs = await made.start("hangs")
            watcher.watch(hangs)
            await watched(hangs)
            pid = await hangs.api.pid()
            os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            async with asyncio.timeout(PATIENCE_S):
                while not watcher.deaths:
                    await asyncio.sleep(0.005)
            assert time.monotonic() - began < 1.0, watcher.deaths
            assert "silent for" in watcher.deaths[0].reason and not watcher.deaths[0].stopped
            os.kill(pid, signal.SIGKILL)

    async def test_a_watcher_that_ends_first_is_forgotten(self, private: Path, tmp_path: Path) -> None:
        async with bench(private, tmp_path) as made:
            watcher = await made.start("watcher")
            local = await made.system.add(Worker(str(made.diary)), "local")
            await watcher.api.watch_it(local)

            await watched(local)
            await made.system.remove("watcher")
            await watched(local, 0)

    async def test_links_bind_both_ends_in_death_and_not_in_a_good_end(
        self, private: Path, tmp_path: Path
    ) -> None:
        async with bench(private, tmp_path) as made:
            one, two, three = [await made.start(name) for name in ("one", "two", "three")]
            await one.api.link_it(two)
            await three.api.link_it(one)
            pids = [await ref.api.pid() for ref in (one, two, three)]
            for ref, watchers in ((one, 2), (two, 1), (three, 1)):
                await watched(ref, watchers)
            await made.system.remove("two")
            assert await one.api.pid() == pids[0]
            os.kill(pids[0], signal.SIGKILL)
            await eventually(lambda: pid_of(three), lambda pid: pid not in (0, pids[2]))
            assert "actor one died" in (tmp_path / "three.log").read_text()

    async def test_who_links_to_the_dead_fails(self, private: Path, tmp_path: Path) -> None:
        async with ActorSystem("tests", private, settings=Settings(connect_timeout_s=0.05)) as system:
            worker = await system.add(Worker(str(tmp_path / "diary")), "worker")
            await worker.api.link_it(system.ref("missing", f"ipc://{private}/missing.sock", Worker))
            failure = await asyncio.wait_for(system.failure, PATIENCE_S)
        assert isinstance(failure, ActorDead) and not isinstance(failure, Unreachable)
        assert "actor missing died: no connection within 0.05 s" in str(failure)


async def watched(ref: ActorRef[Worker], count: int = 1) -> None:
    """Returns once so many watch it: a link takes two round trips."""
    await eventually(ref.api.watchers, lambda found: found == count)
