"""Requests whose caller was given ActorDead do not run later, over every wire and between processes."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import ActorDead
from flexmarl.core.protocol.session import LinkState
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.memory import MemoryWire
from flexmarl.core.wire.zeromq import Tcp

from ..patience import PATIENCE_S
from .clusters import QUICK, Cluster, over_every_transport, until
from .runtime_actors import Point, Subject

Answer = TypeVar("Answer")
BRIEF = replace(QUICK, heartbeat_s=0.1, connect_timeout_s=20.0)


class Counter(Actor):
    """Counts, by name."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def count(self, name: str) -> int:
        self.counts[name] = self.counts.get(name, 0) + 1
        return self.counts[name]

    @endpoint
    async def block(self, gate: str) -> None:
        """Blocks the loop until there is a file ``gate``, as a library does that computes for long."""
        while not os.path.exists(gate):  # noqa: PTH110
            time.sleep(0.01)  # noqa: ASYNC251

    @endpoint
    async def read(self) -> dict[str, int]:
        return self.counts


async def answer(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """The answer to a question that may be asked twice: it is asked again after each loss."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await ask()
            except ActorDead:
                await asyncio.sleep(0.01)


class TestAPausedProcess:
    @over_every_transport
    async def test_begins_nothing_of_callers_that_have_given_up(self, cluster: Cluster) -> None:
        asking, serving = await cluster.start("asking", BRIEF), await cluster.start("serving", BRIEF)
        if not isinstance(serving._wire, MemoryWire):
            return  # between processes, below: these two share one loop
        network = serving._wire.network
        actor = Subject()
        await serving.add(actor, "subject")
        subject = asking.ref("subject", serving.address, Subject)
        assert await subject.api.add(0) == 1
        for turn in range(1, 4):
            network.pause("serving")
            calls = [asyncio.ensure_future(subject.api.add(turn)) for _ in range(20)]
            await asyncio.gather(*(subject.tell("hear", turn) for _ in range(20)))
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, ActorDead)
            network.resume("serving")
            assert await answer(lambda: subject.api.move(Point(1))) == Point(2)
            assert await subject.within(60.0).add(100 + turn) == 1
            fresh = await cluster.start(f"fresh-{turn}", BRIEF)
            assert await fresh.ref("subject", serving.address, Subject).api.move(Point(1)) == Point(2)
            assert turn not in actor.added and actor.heard == []


@pytest.mark.parametrize("wire", ["ipc", "tcp"])
async def test_a_stopped_process_that_continues_begins_nothing_of_callers_that_have_given_up(
    private: Path, tmp_path: Path, wire: str
) -> None:
    tcp = Tcp() if wire == "tcp" else None
    async with ActorSystem("asking", private, tcp=tcp, settings=BRIEF, log_directory=tmp_path) as asking:
        counter = await asking.spawn(Counter, "counter", process=True)
        pid = await answer(lambda: counter.api.pid())
        process = psutil.Process(pid)
        session = asking._local.network.connection(counter.address).session
        for _ in range(3):
            await answer(lambda: counter.api.count("before"))
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: process.status() == psutil.STATUS_STOPPED)  # until then requests begin
            try:
                calls = [asyncio.ensure_future(counter.api.count("late")) for _ in range(50)]
                await asyncio.gather(*(counter.tell("count", "late tell") for _ in range(50)))
                for error in await asyncio.gather(*calls, return_exceptions=True):
                    assert isinstance(error, ActorDead) and "silent" in error.reason
            finally:
                os.kill(pid, signal.SIGCONT)
            async with ActorSystem("fresh", keys=asking.keys, settings=BRIEF) as fresh:
                other = fresh.ref("counter", counter.address, Counter)
                await answer(lambda: other.api.count("fresh"))  # noqa: B023
                await answer(lambda: counter.api.count("after"))
                counts = await answer(lambda: other.api.read())  # noqa: B023
            assert not {"late", "late tell"} & counts.keys()
            await until(lambda: session.state is LinkState.UP)


async def test_a_handler_that_blocks_its_loop_lets_nothing_begin_of_callers_that_have_given_up(
    private: Path, tmp_path: Path
) -> None:
    """The requests behind it came with it: they are in the mailbox before it begins."""
    async with ActorSystem("asking", private, settings=BRIEF, log_directory=tmp_path) as asking:
        counter = await asking.spawn(Counter, "counter", process=True)
        for turn in range(3):
            await answer(lambda: counter.api.count("before"))
            alone = counter.tell("count", f"first {turn}")  # the rest of this tick leaves in one message
            gate = tmp_path / f"gate {turn}"
            patient = counter.within(PATIENCE_S)
            blocked = [patient.block(str(gate)), *(patient.count("late") for _ in range(7))]
            told = [alone, *(counter.tell("count", "late tell") for _ in range(7))]
            for error in await asyncio.gather(*blocked, return_exceptions=True):
                assert isinstance(error, ActorDead) and "silent" in error.reason
            await asyncio.gather(*told)
            gate.touch()
            await answer(lambda: counter.api.count("after"))
        counts = await answer(lambda: counter.api.read())
        assert not {"late", "late tell"} & counts.keys()
