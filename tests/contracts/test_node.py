"""The contract of nodes: processes over ipc, over TCP, of a node actor; and in virtual time actors in memory, also of a
node actor."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexmarl.core.errors import ActorDead, ActorFailed, FlexmarlError, LocalProtocolError
from flexmarl.core.protocol.session import Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.children import NodeChild
from flexmarl.core.supervision.node import Node
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.remote_node import NodeActor, NodeApi, RemoteNode
from flexmarl.core.supervision.restart_policy import Intensity
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.testing.memory_node import MemoryNode
from flexmarl.core.wire.memory import MemoryNetwork
from flexmarl.core.wire.zeromq import Tcp
from flexmarl.launch.hosts import env

from ..core.echo import Echo, NeverReady, RefusesToStart, Worker
from ..patience import PATIENCE_S

# A process may take long to start, and calls to it wait.
SETTINGS = Settings(connect_timeout_s=PATIENCE_S)


@dataclass
class House:
    """A supervisor that restarts actors on one node."""

    system: ActorSystem
    supervisor: Supervisor
    node: Node
    directory: Path
    folder: Path
    """The folder of the logs and the diary."""
    in_memory: MemoryNode | None
    """The node, or that of its ``NodeActor``."""

    @property
    def diary(self) -> Path:
        return self.folder / "diary"

    async def worker(self, name: str = "worker", **options: Any) -> ActorRef[Worker]:
        return await self.supervisor.spawn(Worker, name, {"diary": str(self.diary), **options})

    def signal(self, name: str, number: signal.Signals) -> None:
        child = self.supervisor._children[name]
        assert isinstance(child, NodeChild)
        if (node := self.in_memory) is None:
            assert child.running is not None
            os.kill(int(child.running.label.split()[1]), number)
            return
        {signal.SIGKILL: node.kill, signal.SIGSTOP: node.freeze, signal.SIGCONT: node.thaw}[number](name)

    def written(self) -> list[str]:
        return self.diary.read_text().splitlines()


Case = Callable[[House], Awaitable[None]]


@asynccontextmanager
async def remote_node(system: ActorSystem, far: ActorSystem, inner: Node) -> AsyncIterator[RemoteNode]:
    """``inner``: of the other host's process, whose system is ``far``."""
    async with far:
        actor = await far.add(NodeActor(inner), "node")
        node = RemoteNode("far", system.ref("node", actor.address, NodeApi))
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(node.watch())
            yield node
            watch.cancel()


async def within(kind: str, case: Case) -> None:
    with tempfile.TemporaryDirectory(dir=env.runtime_base()) as base:
        private, far, folder = (Path(base) / name for name in ("private", "far", "logs"))
        for directory in (private, far, folder):
            directory.mkdir(mode=0o700)
        (folder / "diary").touch()
        network = MemoryNetwork(seed=1)
        tcp = Tcp() if kind in ("tcp", "remote") else None
        in_memory = MemoryNode(network, private, settings=SETTINGS) if "memory" in kind else None
        wire = None if in_memory is None else network.wire("tests")
        async with (
            ActorSystem("tests", private, tcp=tcp, wire=wire, settings=SETTINGS) as system,
            AsyncExitStack() as exits,
        ):
            node: Node = in_memory or ProcessNode(system, private, folder, None)
            directory = private
            if kind == "remote":
                host = ActorSystem("far", far, tcp=Tcp(keys=system.keys), settings=SETTINGS)
                inner, directory = ProcessNode(host, far, folder, None), far
                node = await exits.enter_async_context(remote_node(system, host, inner))
            elif kind == "remote in memory":
                host = ActorSystem("far", far, wire=network.wire("node/far"), settings=SETTINGS)
                node = await exits.enter_async_context(remote_node(system, host, node))
            async with Supervisor(system, node, intensity=Intensity(5, 600.0)) as supervisor:
                async with asyncio.timeout(PATIENCE_S):
                    await case(House(system, supervisor, node, directory, folder, in_memory))
            node.close()
        assert not [*private.glob("*.sock"), *far.glob("*.sock")]
    assert len(asyncio.all_tasks()) == 1, "a task outlived its system"


@pytest.fixture(params=["ipc", "tcp", "remote", "memory", "remote in memory"])
def check(request: pytest.FixtureRequest) -> Callable[[Case], None]:
    def run(case: Case) -> None:
        (virtual_time.run if "memory" in request.param else asyncio.run)(within(request.param, case))

    return run


async def next_incarnation(worker: ActorRef[Worker], after: int) -> int:
    while True:
        try:
            if (found := await worker.within(5.0).incarnation()) != after:
                return found
        except FlexmarlError:
            await asyncio.sleep(0.01)


def test_an_address_is_known_before_the_actor_and_calls_to_it_wait(check: Callable[[Case], None]) -> None:
    async def case(house: House) -> None:
        addresses = [await house.node.reserve("worker") for _ in range(2)]
        assert addresses[0] == addresses[1] != await house.node.reserve("other")
        early = asyncio.create_task(house.system.ref("worker", addresses[0], Worker).api.incarnation())
        worker = await house.worker()
        assert worker.address == addresses[0] and await early == await worker.api.incarnation()
        house.node.release("other")

    check(case)


def test_arguments_come_as_a_message_and_the_directory_is_the_nodes(check: Callable[[Case], None]) -> None:
    async def case(house: House) -> None:
        echo = await house.supervisor.spawn(Echo, "echo", {"greeting": "good morning"})
        assert await echo.api.greet("you") == "good morning you"
        with pytest.raises(ActorFailed, match="greeting: .*valid string"):
            await house.supervisor.spawn(Echo, "deaf", {"greeting": ["no", "text"]})
        worker = await house.worker()
        assert Path(await worker.api.directory()) == house.directory

    check(case)


def test_a_start_that_fails_says_why_and_leaves_the_name_free(check: Callable[[Case], None]) -> None:
    async def case(house: House) -> None:
        with pytest.raises(ActorFailed, match="nothing to serve"):
            await house.supervisor.spawn(RefusesToStart, "worker")
        assert await (await house.worker()).api.incarnation()

    check(case)


def test_a_start_that_is_given_up_leaves_nothing(check: Callable[[Case], None]) -> None:
    async def case(house: House) -> None:
        starting = asyncio.create_task(house.supervisor.spawn(NeverReady, "worker"))
        while "worker" not in house.supervisor._children:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert await (await house.worker()).api.incarnation()

    check(case)


@pytest.mark.usefixtures("patient_for_exit_reasons")
def test_a_kill_fails_pending_calls_and_the_next_incarnation_has_the_address(
    check: Callable[[Case], None],
) -> None:
    async def case(house: House) -> None:
        worker = await house.worker()
        first = await worker.api.incarnation()
        hanging = [asyncio.ensure_future(worker.within(60.0).hang()) for _ in range(20)]
        await worker.api.incarnation()  # they have arrived
        house.signal("worker", signal.SIGKILL)
        ends = await asyncio.gather(*hanging, return_exceptions=True)
        assert all(isinstance(end, ActorDead) and "signal 9" in str(end) for end in ends), ends[0]
        assert await next_incarnation(worker, first) > first
        assert house.written() == ["start worker", "start worker"], "on_stop runs after no kill"

    check(case)


def test_a_failure_of_the_actor_is_reported_and_it_is_restarted(check: Callable[[Case], None]) -> None:
    async def case(house: House) -> None:
        reasons: list[FlexmarlError] = []
        house.supervisor.on_restart = lambda name, reason: reasons.append(reason)
        worker = await house.worker()
        first = await worker.api.incarnation()
        await worker.api.crash()
        await next_incarnation(worker, first)
        assert isinstance(reasons[0], ActorFailed) and "RuntimeError: crashed" in str(reasons[0])

    check(case)


def test_a_frozen_actor_is_killed_when_it_is_reported_lost_and_not_its_successor(
    check: Callable[[Case], None],
) -> None:
    async def case(house: House) -> None:
        worker = await house.worker()
        first = await worker.api.incarnation()
        house.signal("worker", signal.SIGSTOP)
        await house.supervisor.ref.api.lost("worker", first, "silent")
        second = await next_incarnation(worker, first)
        await house.supervisor.ref.api.lost("worker", first, "silent")
        assert await worker.api.incarnation() == second

    check(case)


def test_a_frozen_actor_continues_when_it_is_thawed(check: Callable[[Case], None]) -> None:
    async def case(house: House) -> None:
        worker = await house.worker()
        first = await worker.api.incarnation()
        house.signal("worker", signal.SIGSTOP)
        asked = asyncio.ensure_future(worker.within(60.0).incarnation())
        await asyncio.sleep(0.3)
        assert not asked.done()
        house.signal("worker", signal.SIGCONT)
        assert await asked == first

    check(case)


def test_a_stop_is_in_good_order_and_later_calls_are_dead(check: Callable[[Case], None]) -> None:
    async def case(house: House) -> None:
        worker = await house.worker()
        await house.supervisor.stop("worker")
        assert house.written() == ["start worker", "stop worker"]
        with pytest.raises(ActorDead, match="stopped it"):
            await worker.api.incarnation()
        assert await (await house.worker()).api.incarnation()

    check(case)


def test_one_that_does_not_stop_is_killed(check: Callable[[Case], None]) -> None:
    async def case(house: House) -> None:
        await house.worker()
        house.signal("worker", signal.SIGSTOP)
        await house.supervisor.stop("worker")
        assert "worker" not in house.supervisor.running

    check(case)


def test_a_class_that_no_process_could_import_is_refused(check: Callable[[Case], None]) -> None:
    class Local(Echo): ...

    async def case(house: House) -> None:
        with pytest.raises(LocalProtocolError, match="defined inside a function"):
            await house.supervisor.spawn(Local, "local")

    check(case)
