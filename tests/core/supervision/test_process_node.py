"""The start of an actor in a process of its own, and starts that fail."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import structlog

from flexmarl.core.errors import ActorDead, ActorFailed, ActorNotFound, LocalProtocolError, TooManyRestarts
from flexmarl.core.protocol.session import Settings
from flexmarl.core.supervision.forking import ForkServer
from flexmarl.core.supervision.process_node import ChildProcess, _last_lines, is_exiting
from flexmarl.core.supervision.restart_policy import Intensity
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.zeromq import Tcp

from ...patience import PATIENCE_S
from ..echo import Echo, Worker
from .workers import bench, eventually, fate, pid_of


def test_a_process_is_exiting_from_its_death_until_it_is_waited_for() -> None:
    pid = os.fork()
    if not pid:
        signal.pause()
    assert not is_exiting(pid) and not is_exiting(os.getpid())
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert is_exiting(pid)
    os.waitpid(pid, 0)
    assert not is_exiting(pid)


@pytest.mark.parametrize("tcp", [None, Tcp(), Tcp(plain=True)], ids=["ipc", "curve", "plain"])
async def test_an_address_is_known_before_the_first_process_and_calls_to_it_wait(
    private: Path, tmp_path: Path, tcp: Tcp | None
) -> None:
    async with bench(private, tmp_path, tcp=tcp, settings=Settings(connect_timeout_s=PATIENCE_S)) as made:
        node = made.supervisor._node
        addresses = [await node.reserve("worker") for _ in range(2)]
        assert addresses[0] == addresses[1] != await node.reserve("other")
        waiting = asyncio.create_task(made.system.ref("worker", addresses[0], Worker).api.pid())
        worker = await made.start("worker")
        assert worker.address == addresses[0] and await waiting == await worker.api.pid()
        os.kill(await worker.api.pid(), signal.SIGKILL)
        assert await eventually(lambda: pid_of(worker), lambda pid: pid not in (0, waiting.result()))
        node.close()


def processes() -> set[psutil.Process]:
    """The children of this process and theirs: an actor's process is one of the fork server's."""
    return {*psutil.Process().children(recursive=True)}


async def no_processes(but: set[psutil.Process]) -> None:
    await eventually(lambda: asyncio.to_thread(processes), lambda found: found <= but)


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
        monkeypatch.setattr("flexmarl.core.supervision.node.START_TIMEOUT_S", 0.5)
        before = processes()
        async with bench(private, tmp_path) as made:
            with pytest.raises(ActorDead, match=r"not ready within 0.5 s"):
                await made.supervisor.spawn("echo:NeverReady", "late", {})
            await no_processes(but=before)

    async def test_a_start_that_is_given_up_leaves_no_process(self, private: Path, tmp_path: Path) -> None:
        before = processes()
        async with bench(private, tmp_path) as made:
            starting = asyncio.create_task(made.supervisor.spawn("echo:NeverReady", "late", {}))
            await eventually(lambda: asyncio.to_thread(processes), lambda found: found - before)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            await no_processes(but=before)
            assert (await made.start("late")).name == "late"

    async def test_nobody_waits_for_ever_for_what_outlives_sigkill(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("flexmarl.core.supervision.node._KILL_GRACE_S", 0.05)
        server = ForkServer([], [], dict(os.environ), tmp_path / "server.log")
        process = await ChildProcess.start(
            "stuck", 1, server, [str(tmp_path), "stuck", "shared"], b"", tmp_path / "log", dict(os.environ)
        )
        process.kill()
        with structlog.testing.capture_logs() as logs:
            await process.wait_gone()  # no watch reports its end
        assert [line["event"] for line in logs] == ["process does not end"]
        await process.wait_ended()
        server.close()

    async def test_restarts_that_do_not_help_set_the_failure_of_the_system(self, private: Path) -> None:
        async with ActorSystem("tests", private, intensity=Intensity(1, 60)) as system:
            echo = await system.spawn(Echo, "echo")
            for _ in range(2):
                await eventually(lambda: fate(echo.api.crash_in_background()), lambda how: how == "answered")
            failure = await asyncio.wait_for(system.failure, PATIENCE_S)
        assert isinstance(failure, TooManyRestarts) and (failure.actor, failure.restarts) == ("echo", 1)


def test_the_end_of_a_log_has_no_routine_records(tmp_path: Path) -> None:
    log = tmp_path / "actor.log"
    log.write_text('{"level": "info", "event": "started"}\n' * 20)
    assert _last_lines(log) == ""
    warning, traceback = '{"level": "warning", "event": "slow"}', "Traceback (most recent call last):"
    log.write_text(f'{warning}\n{{"level": "info", "event": "chosen"}}\n{traceback}\n7\n')
    assert _last_lines(log) == f"\nThe last lines of {log}:\n{warning}\n{traceback}\n7"


def test_the_end_of_a_long_log_has_whole_records(tmp_path: Path) -> None:
    log = tmp_path / "actor.log"
    records = [json.dumps({"level": "warning", "text": "x" * 9000, "number": number}) for number in range(20)]
    log.write_text("".join(f"{record}\n" for record in records))
    lines = _last_lines(log).splitlines()[2:]
    assert lines == records[20 - len(lines) :]
    assert 1 < len(lines) < 15
