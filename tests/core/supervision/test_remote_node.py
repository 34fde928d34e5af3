"""The loss of nodes: each is a process of its own, on this host."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from flexmarl.core.errors import ActorDead
from flexmarl.core.protocol.session import Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.node import Launch, Node, Running
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.remote_node import NodeActor, NodeApi, RemoteNode, RemoteRunning
from flexmarl.core.supervision.restart_policy import Intensity
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.zeromq import Tcp

from ...patience import PATIENCE_S
from ...processes import process
from ..echo import Worker
from .workers import ENVIRONMENT, WORKER, eventually

_NODE = """
import asyncio, sys
from pathlib import Path
from flexmarl.core import ActorSystem, Keys, ProcessNode, Settings, Tcp
from flexmarl.core.supervision.remote_node import NodeActor
async def main():
    directory, keys, logs = map(Path, sys.argv[1:4])
    tcp, settings = Tcp(keys=Keys.load(keys)), Settings(heartbeat_s=float(sys.argv[6]))
    async with ActorSystem(sys.argv[4], directory, tcp=tcp, settings=settings) as system:
        node = NodeActor(ProcessNode(system, directory, logs, {"PYTHONPATH": sys.argv[5]}))
        print((await system.add(node, "node")).address, flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


@dataclass
class Cluster:
    """A supervisor, and nodes by name. ``places``: the node to move to, by the name of the lost one."""

    system: ActorSystem
    supervisor: Supervisor
    folder: Path
    diary: Path
    exits: AsyncExitStack
    group: asyncio.TaskGroup
    heartbeat_s: float
    nodes: dict[str, RemoteNode] = field(default_factory=dict)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    async def node(self, name: str) -> RemoteNode:
        directory = self.folder / name
        directory.mkdir(mode=0o700)
        paths = directory, self.system.keys_file, self.diary.parent
        made = self.exits.enter_context(
            process(_NODE, *map(str, paths), name, ENVIRONMENT["PYTHONPATH"], str(self.heartbeat_s))
        )
        assert made.stdout is not None
        address = (await asyncio.to_thread(made.stdout.readline)).decode().strip()
        self.processes[name] = made
        self.nodes[name] = node = RemoteNode(name, self.system.ref("node", address, NodeApi))
        self.exits.callback(self.group.create_task(node.watch()).cancel)
        return node

    async def worker(self, name: str, node: RemoteNode) -> ActorRef[Worker]:
        ref = await self.supervisor.spawn(WORKER, name, {"diary": str(self.diary)}, node=node)
        return self.system.ref(name, ref.address, Worker)

    async def moved(self, name: str, before: str) -> ActorRef[Worker]:
        """A reference to the actor at its next address, once it answers."""
        await eventually(self._address(name), lambda found: found not in ("", before))
        ref = self.supervisor.reference(name, Worker)
        await ref.within(PATIENCE_S).incarnation()
        await eventually(self._running, lambda found: name in found)
        return ref

    def _address(self, name: str) -> Callable[[], Awaitable[str]]:
        async def address() -> str:
            return self.supervisor._children[name].address

        return address

    async def _running(self) -> list[str]:
        return self.supervisor.running


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def cluster(
    private: Path, folder: Path, heartbeat_s: float = Settings().heartbeat_s
) -> AsyncIterator[Cluster]:
    diary = folder / "diary"
    diary.touch()
    async with (
        asyncio.timeout(PATIENCE_S),
        asyncio.TaskGroup() as group,
        ActorSystem("head", private, tcp=Tcp(), settings=Settings(heartbeat_s=heartbeat_s)) as system,
        AsyncExitStack() as exits,
    ):
        here = ProcessNode(system, private, folder, ENVIRONMENT)
        intensity = Intensity(max_restarts=0)
        async with Supervisor(system, here, intensity=intensity) as supervisor:
            assert system.keys is not None
            system.keys.save(system.keys_file)
            yield Cluster(system, supervisor, private, diary, exits, group, heartbeat_s)
        here.close()


async def test_the_actors_of_a_killed_node_move_and_nothing_of_them_stays(
    private: Path, tmp_path: Path
) -> None:
    async with cluster(private, tmp_path) as made:
        near, far = await made.node("near"), await made.node("far")
        reasons: list[str] = []

        def another(name: str, lost: ActorDead) -> tuple[RemoteNode, dict[str, str]]:
            reasons.append(lost.reason)
            return near, {}

        made.supervisor.another_node = another
        first = [await made.worker(f"worker-{number}", far) for number in range(2)]
        pids = [await worker.api.pid() for worker in first]
        hanging = [asyncio.ensure_future(worker.within(PATIENCE_S).hang()) for worker in first]
        await asyncio.gather(*(worker.api.incarnation() for worker in first))
        made.processes["far"].kill()
        for call in hanging:
            with pytest.raises(ActorDead):
                await call
        for worker in first:
            second = await made.moved(worker.name, worker.address)
            assert await second.api.directory() == str(private / "near")
            with pytest.raises(ActorDead, match="node far is lost: its process ended or closed"):
                await worker.api.pid()
        assert len(reasons) == 2 and far.lost is not None and near.lost is None
        assert not made.supervisor.failure.done(), "the loss of a node counts as no restart"
        while any(map(is_running, pids)) or (private / "far").exists():
            await asyncio.sleep(0.01)


async def test_without_another_node_its_actors_are_given_up_alone_until_there_is_one(
    private: Path, tmp_path: Path
) -> None:
    async with cluster(private, tmp_path) as made:
        near, far = await made.node("near"), await made.node("far")
        made.supervisor.another_node = lambda name, lost: None
        stays, goes = await made.worker("stays", near), await made.worker("goes", far)
        made.processes["far"].kill()
        with pytest.raises(ActorDead, match="actor goes died: node far is lost"):
            await goes.within(PATIENCE_S).hang()
        assert made.supervisor.find("goes") is None and not made.supervisor.failure.done()
        assert await stays.api.incarnation()
        with pytest.raises(ActorDead, match="node far is lost"):
            await made.worker("late", far)
        assert far.lost is not None
        made.supervisor.take_up("goes", far.lost, near, {})
        again = await made.moved("goes", goes.address)
        assert await made.supervisor.locate("goes") == again.address != goes.address
        assert made.supervisor.find("goes") is not None and await made.supervisor.locate("unknown") == ""
        assert await made.supervisor.locate_node("goes") == near.address != ""
        assert await made.supervisor.locate_node("unknown") == ""


async def test_a_frozen_node_is_given_up_and_its_actors_are_refused_afterwards(
    private: Path, tmp_path: Path
) -> None:
    async with cluster(private, tmp_path, heartbeat_s=1.0) as made:
        near, far = await made.node("near"), await made.node("far")
        made.supervisor.another_node = lambda name, lost: (near, {})
        first = await made.worker("worker", far)
        made.processes["far"].send_signal(signal.SIGSTOP)
        second = await made.moved("worker", first.address)
        life = await second.api.incarnation()
        assert far.lost is not None and "silent for over 2 s" in far.lost.reason
        made.processes["far"].send_signal(signal.SIGCONT)
        async with ActorSystem("other", keys=made.system.keys) as other:
            late = other.ref("worker", first.address, Worker)
            assert await late.api.incarnation() < life, "it still runs"
            before = made.system._local.network.refused_messages
            await late.api.crash()  # it reports that to its supervisor
            await eventually(_refused(made.system), lambda refused: refused > before)
        assert await second.api.incarnation() == life and made.supervisor.running == ["worker"]
        os.kill(made.processes["far"].pid, signal.SIGKILL)


def _refused(system: ActorSystem) -> Callable[[], Awaitable[int]]:
    async def refused() -> int:
        return system._local.network.refused_messages

    return refused


async def test_a_launch_that_the_node_refuses_says_so(private: Path, tmp_path: Path) -> None:
    async with cluster(private, tmp_path) as made:
        far = await made.node("far")
        (tmp_path / "worker.log").mkdir()
        with pytest.raises(OSError, match=r"node far: .*Is a directory"):
            await made.worker("worker", far)
        assert await (await made.worker("other", far)).api.pid()


class Gone:
    """The reference to a ``NodeActor`` whose process has just ended."""

    name = "node"

    def tell_nowait(self, endpoint: str, *args: object) -> None:
        raise ActorDead(self.name, "its process ended")


async def test_the_signals_to_a_node_that_has_just_ended_end_its_actors() -> None:
    node = RemoteNode("far", cast(ActorRef[Any], Gone()))
    running = RemoteRunning("worker", 1, node)
    node._running["worker"] = running
    running.kill()
    assert (
        running.has_exited() and node.lost is not None and "node far is lost: its process" in node.lost.reason
    )
    node.release("worker")


class SlowRunning(Running):
    """A process that ends when it is killed."""

    def __init__(self) -> None:
        super().__init__("worker", 1, "process")
        self.killed = asyncio.Event()

    def has_exited(self) -> bool:
        return self.killed.is_set()

    async def wait_exit(self) -> str:
        await self.killed.wait()
        return "killed by signal 9"

    def terminate(self) -> None:
        raise AssertionError("it has no actor yet, to end in good order")

    def end(self) -> None:
        self.killed.set()


class SlowNode(Node):
    """Starts a process once ``may_start`` is set."""

    name = "slow"

    def __init__(self) -> None:
        self.process, self.may_start = SlowRunning(), asyncio.Event()

    async def launch(self, launch: Launch) -> Running:
        await self.may_start.wait()
        return self.process

    def check(self, launch: Launch) -> None:
        """It starts all."""

    async def reserve(self, actor: str) -> str:
        raise AssertionError(actor)

    def release(self, actor: str) -> None:
        raise AssertionError(actor)

    def close(self) -> None:
        """It has no address."""


@pytest.mark.parametrize("at_once", [True, False])
async def test_an_incarnation_that_is_ended_while_it_is_being_started_is_killed(at_once: bool) -> None:
    node = SlowNode()
    async with ActorSystem("head") as system:
        actor = await system.add(NodeActor(node), "node")
        api = actor.within(PATIENCE_S)
        launch = Launch("worker", WORKER, [], {}, ("supervisor", "tcp://127.0.0.1:1"), 1)
        exits = api.exits()
        first = asyncio.ensure_future(anext(exits))
        starting = asyncio.create_task(api.launch(launch))
        await api.end("worker", 1, at_once)
        await api.end("worker", 0, at_once)
        node.may_start.set()
        assert await starting == "process"
        assert (await asyncio.wait_for(first, PATIENCE_S)).how == "killed by signal 9"
        await exits.aclose()


async def test_the_end_of_a_node_waits_for_processes_that_are_being_started_and_ends_them_too() -> None:
    node = SlowNode()
    async with ActorSystem("head") as system:
        own = NodeActor(node)
        api = (await system.add(own, "node")).within(PATIENCE_S)
        launch = Launch("worker", WORKER, [], {}, ("supervisor", "tcp://127.0.0.1:1"), 1)
        starting = asyncio.create_task(api.launch(launch))
        await api.end("worker", 0, True)  # the launch is there by now
        ending = asyncio.create_task(own.kill_all())
        await asyncio.sleep(0)
        assert not ending.done()
        node.may_start.set()
        await ending
        assert node.process.killed.is_set() and await starting == "process"
        node.process = SlowRunning()
        assert await api.launch(launch) == "process"
        assert node.process.killed.is_set(), "none is started afterwards"
