"""Processes that are forked from one that has imported what they need."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from flexmarl.core.errors import ActorDead
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.forking import ForkedProcess, ForkServer
from flexmarl.core.supervision.process_node import ChildProcess, ProcessNode
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem

from ...patience import PATIENCE_S
from ..warm import Warm
from . import workers
from .workers import eventually

ENVIRONMENT = workers.ENVIRONMENT | {"OMP_NUM_THREADS": "1"}  # else numpy starts threads when it is imported


@asynccontextmanager
async def supervisor_of(
    private: Path, logs: Path, modules: Sequence[str], late: Sequence[str] = ()
) -> AsyncIterator[Supervisor]:
    async with ActorSystem("tests", private) as system:
        node = ProcessNode(system, private, logs, ENVIRONMENT, modules=modules, late_variables=late)
        async with Supervisor(system, node) as supervisor:
            yield supervisor


async def spawn(supervisor: Supervisor, name: str, **env: str) -> ActorRef[Warm]:
    await supervisor.spawn("warm:Warm", name, {}, env=env)
    return supervisor.reference(name, Warm)


def server(supervisor: Supervisor) -> int:
    """The process of the node's server. One of an earlier test may not have ended yet."""
    node = supervisor._node
    assert isinstance(node, ProcessNode) and node._server is not None
    return node._server.pid


async def test_modules_are_imported_once_and_nothing_random_is_shared(private: Path, tmp_path: Path) -> None:
    async with supervisor_of(private, tmp_path, ["warm"]) as supervisor:
        actors = [await spawn(supervisor, name) for name in ("a", "b")]
        assert {await actor.api.imported_by() for actor in actors} == {server(supervisor)}
        assert len({await actor.api.drawn() for actor in actors}) == 2
        assert len({await actor.api.drawn_by_numpy() for actor in actors}) == 2
        pids = [await actor.api.pid() for actor in actors]
        assert [os.getsid(pid) for pid in pids] == pids
        assert " ".join(psutil.Process(pids[0]).cmdline()).split() == [
            "flexmarl-actor",
            str(private),
            "a",
        ]


async def test_an_environment_may_be_larger_than_a_message(private: Path, tmp_path: Path) -> None:
    large = {f"SERVICE_{number}": "x" * 100_000 for number in range(8)}
    async with supervisor_of(private, tmp_path, ["warm"], late=list(large)) as supervisor:
        actor = await spawn(supervisor, "a", **large)
        assert await actor.api.imported_by() == server(supervisor)


async def test_an_environment_may_hold_bytes_that_are_not_utf_8(private: Path, tmp_path: Path) -> None:
    async with supervisor_of(private, tmp_path, ["warm"], late=["BYTES"]) as supervisor:
        actor = await spawn(supervisor, "a", BYTES=os.fsdecode(b"a\xff"))
        assert await actor.api.imported_by() == server(supervisor)


async def test_variables_that_a_module_may_have_read_get_a_new_interpreter(
    private: Path, tmp_path: Path
) -> None:
    async with supervisor_of(private, tmp_path, ["warm"], late=["DEVICES", "TMPDIR"]) as supervisor:
        late = await spawn(supervisor, "late", DEVICES="1", TMPDIR=str(tmp_path))
        assert await late.api.imported_by() == server(supervisor)
        assert (await late.api.variable("DEVICES"), await late.api.temporary_folder()) == ("1", str(tmp_path))
        early = await spawn(supervisor, "early", THREADS="3")
        assert await early.api.imported_by() == await early.api.pid()
        assert await early.api.variable("THREADS") == "3" and await late.api.variable("THREADS") is None


@pytest.mark.parametrize(
    ("module", "reported"),
    [
        ("threaded", "modules have started threads (endless)"),
        ("device", "modules have opened /dev/full"),
        ("broken", "no such device"),
    ],
)
async def test_a_module_that_can_not_be_shared_is_logged_and_actors_start(
    private: Path, tmp_path: Path, module: str, reported: str
) -> None:
    async with supervisor_of(private, tmp_path, ["warm", module]) as supervisor:
        actor = await spawn(supervisor, "actor")
        own = await actor.api.pid()
        assert await actor.api.imported_by() == (server(supervisor) if module == "broken" else own)
    text = (tmp_path / "fork-server.log").read_text()
    assert reported in text and "forked beside a thread" not in text


async def test_actors_outlive_the_server_and_the_next_start_has_another(
    private: Path, tmp_path: Path
) -> None:
    async with supervisor_of(private, tmp_path, ["warm"]) as supervisor:
        first = await spawn(supervisor, "first")
        before = server(supervisor)
        os.kill(before, signal.SIGKILL)
        node = supervisor._node
        assert isinstance(node, ProcessNode) and node._server is not None
        while not node._server.ended:
            await asyncio.sleep(0.01)
        second = await spawn(supervisor, "second")
        assert await second.api.imported_by() == server(supervisor) != before
        os.kill(await first.api.pid(), signal.SIGKILL)
        with pytest.raises(ActorDead, match="ended with an unknown exit status"):
            await asyncio.wait_for(supervisor.wait_failed(), PATIENCE_S)


async def test_actors_start_although_the_server_is_killed_meanwhile(private: Path, tmp_path: Path) -> None:
    """A kill at any time of a start: before the request, with it under way, and after the answer."""
    draw = random.Random(1)
    async with supervisor_of(private, tmp_path, []) as supervisor:
        node = supervisor._node
        assert isinstance(node, ProcessNode)
        for number in range(8):
            starting = [asyncio.create_task(spawn(supervisor, f"{number}{which}")) for which in range(2)]
            while node._server is None or not node._server._waiters:
                await asyncio.sleep(0)
            if number % 2:
                await asyncio.sleep(draw.uniform(0, 0.05))
            if not node._server.ended:
                node._server._process.kill()
            for actor in await asyncio.wait_for(asyncio.gather(*starting), PATIENCE_S):
                assert await actor.api.pid()
                await supervisor.stop(actor.name)


async def test_modules_that_end_the_server_are_an_error_with_its_log(private: Path, tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os\nprint('no more', flush=True)\nos._exit(3)\n")
    environment = ENVIRONMENT | {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{tmp_path}"}
    async with ActorSystem("tests", private) as system:
        node = ProcessNode(system, private, tmp_path, environment, modules=["deadly"])
        async with Supervisor(system, node) as supervisor:
            with pytest.raises(ChildProcessError, match=r"(?s)actor: .* ended 3 times in a row.*no more"):
                await supervisor.spawn("warm:Warm", "actor", {})
    assert (tmp_path / "fork-server.log").read_text().count("no more") == 3


class TestForkedProcess:
    """Workers that wait for their first message, which never comes."""

    @pytest.fixture
    async def made(self, private: Path, tmp_path: Path) -> AsyncIterator["Made"]:
        made = Made(private, tmp_path)
        yield made
        made.close()

    async def test_it_holds_only_what_it_was_given(self, made: "Made") -> None:
        processes = [await made.fork(name) for name in ("a", "b")]
        await eventually(lambda: asyncio.to_thread(made.titles), lambda titles: len(titles) == 2)
        for process in processes:
            held = [str(link.readlink()) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
            assert not [target for target in held if target.startswith("socket:")]
            assert len([target for target in held if target.startswith("pipe:")]) == 1

    async def test_its_exit_status_is_reported(self, made: "Made") -> None:
        killed, ended = [await made.fork(name) for name in ("a", "b")]
        assert not killed.has_exited()
        killed.send_signal(signal.SIGKILL)
        assert await killed.wait_exit() == "killed by signal 9" and killed.has_exited()
        killed.send_signal(signal.SIGKILL)  # its number may be another process's by now
        made.close_inputs()
        assert await ended.wait_exit() == "exit status 1"

    async def test_without_a_pidfd_too(self, made: "Made", monkeypatch: pytest.MonkeyPatch) -> None:
        process = await made.fork("a")
        old = ForkedProcess(process.pid, -1)
        assert not old.has_exited()
        old.send_signal(signal.SIGTERM)
        old.reported(-15)
        assert await old.wait_exit() == "killed by signal 15" and old.has_exited()
        lost = ForkedProcess((await made.fork("b")).pid, -1)
        lost.server_ended()
        assert await lost.wait_exit() == "ended with an unknown exit status"
        await eventually(lambda: asyncio.to_thread(made.titles), lambda titles: not titles)

    async def test_one_that_nobody_waits_for_any_more_is_killed(self, made: "Made") -> None:
        starting = asyncio.create_task(made.fork("a"))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await made.fork("b")
        await eventually(lambda: asyncio.to_thread(made.titles), lambda titles: titles == ["b"])

    @pytest.mark.parametrize("answered", [False, True])
    async def test_a_start_that_is_cancelled_leaves_no_process(
        self, made: "Made", tmp_path: Path, answered: bool
    ) -> None:
        async def start(name: str) -> ChildProcess:
            arguments = [str(tmp_path), name]
            return await ChildProcess.start(
                name, 1, made.server, arguments, b"", tmp_path / "log", ENVIRONMENT
            )

        living = await start("living")
        starting = asyncio.create_task(start("cancelled"))
        while not made.server._waiters:
            await asyncio.sleep(0)
        if answered:
            made.server._waiters[0].add_done_callback(lambda _: starting.cancel())
        else:
            starting.cancel()
            time.sleep(0.1)  # noqa: ASYNC251  # a loop that is late to read the answer
        with pytest.raises(asyncio.CancelledError):
            await starting
        await eventually(lambda: asyncio.to_thread(made.titles), lambda titles: titles == ["living"])
        living.kill()
        await living.wait_exit()
        await eventually(lambda: asyncio.to_thread(made.titles), lambda titles: not titles)

    async def test_requests_to_a_server_that_has_ended_are_refused(self, made: "Made") -> None:
        waiting = asyncio.create_task(made.fork("a"))
        await asyncio.sleep(0)
        made.server.close()
        for request in (waiting, made.fork("b")):
            with pytest.raises(ChildProcessError, match="the process that forks actors has ended"):
                await request


def command_line(process: psutil.Process) -> list[str]:
    """The words; none if the process has just ended."""
    try:
        return " ".join(process.cmdline()).split()
    except psutil.NoSuchProcess:  # a zombie too
        return []


class Made:
    """A server, and the ends of the pipes on which its processes wait."""

    def __init__(self, private: Path, folder: Path) -> None:
        self._private = private
        self._log = folder / "log"
        self._inputs: list[int] = []
        self.server = ForkServer([], [], ENVIRONMENT, folder / "fork-server.log")

    async def fork(self, name: str) -> ForkedProcess:
        read_end, write_end = os.pipe()
        self._inputs.append(write_end)
        try:
            with self._log.open("ab") as log:
                return await self.server.fork(
                    [str(self._private), name], ENVIRONMENT, [read_end, log.fileno()]
                )
        finally:
            os.close(read_end)

    def titles(self) -> list[str]:
        """The names of the processes that run."""
        words = [command_line(process) for process in psutil.Process().children(recursive=True)]
        return [each[2] for each in words if each[:1] == ["flexmarl-actor"] and len(each) > 2]

    def close_inputs(self) -> None:
        while self._inputs:
            os.close(self._inputs.pop())

    def close(self) -> None:
        self.close_inputs()
        self.server.close()
