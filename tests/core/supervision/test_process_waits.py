"""The waits of a system's actors: of its own process, and of those that it has spawned."""

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.core.waits import OpenWaits, Wait

from ...patience import PATIENCE_S


class Waiting(Actor):
    """Waits in ``on_start``, and in calls. ``gate``: in this process, ends the start."""

    gate: asyncio.Event

    def __init__(self, names_start: bool) -> None:
        self._open = OpenWaits()
        self._names_start = names_start

    async def on_start(self) -> None:
        if self._names_start:
            with self._open.open("its model"):
                await self.gate.wait()
        else:
            await self.gate.wait()

    def waits(self) -> list[Wait]:
        return self._open.current()


class Broken(Actor):
    def waits(self) -> list[Wait]:
        raise ValueError("on purpose")

    def progress(self) -> int:
        raise ValueError("on purpose")


class Working(Actor):
    def __init__(self) -> None:
        self._open = OpenWaits()

    def waits(self) -> list[Wait]:
        return self._open.current()

    def progress(self) -> int:
        return 7

    @endpoint
    async def work(self) -> None:
        with self._open.open("the end of the world", "nothing ends it"):
            await asyncio.Event().wait()


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem("tests") as system:
        yield system


def described(waits: Any) -> dict[str, list[str]]:
    return {name: [wait.text for wait in of_actor] for name, of_actor in waits.items()}


async def test_an_actor_that_starts_says_what_it_waits_for_or_that_it_starts(system: ActorSystem) -> None:
    Waiting.gate = asyncio.Event()
    starts = [
        asyncio.create_task(system.add(Waiting(names_start=named), name))
        for name, named in (("named", True), ("unnamed", False))
    ]
    while len(system._local.waits()) < 2:
        await asyncio.sleep(0)
    assert described(system._local.waits()) == {"named": ["its model"], "unnamed": ["its start (on_start)"]}
    Waiting.gate.set()
    await asyncio.gather(*starts)
    assert system._local.waits() == {}


async def test_an_actor_whose_report_fails_hides_no_other_one(system: ActorSystem) -> None:
    await system.add(Broken(), "broken")
    working = await system.add(Working(), "working")
    call = asyncio.ensure_future(working.api.work())
    while not system._local.waits():
        await asyncio.sleep(0)
    assert described(system._local.waits()) == {"working": ["the end of the world"]}
    assert (await system.process_statistics())["tests"].progress == 7
    call.cancel()


async def test_a_process_that_does_not_answer_is_named(system: ActorSystem) -> None:
    path = f"{Working.__module__}:Working"
    working = await system.spawn(path, "far", process=True)
    await system.spawn(path, "silent", process=True)
    (supervisor,) = [one for one in system._local.supervisors if isinstance(one, Supervisor)]
    call = asyncio.ensure_future(working.ask("work", timeout_s=PATIENCE_S))
    async with asyncio.timeout(PATIENCE_S):
        while not (waits := await supervisor.process_waits(PATIENCE_S))["far"].waits:
            await asyncio.sleep(0.01)
    assert waits["tests"].label == "this process" and waits["tests"].waits == {}
    assert described(waits["far"].waits) == {"far": ["the end of the world"]}
    assert waits["silent"].waits == {}
    pid = (await supervisor.process_statistics())["silent"].pid
    psutil.Process(pid).suspend()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
        report = (await supervisor.process_waits(0.05))["silent"]
        assert report.waits is None
        assert report.label.endswith(f", stopped by a signal: `kill -CONT {pid}` continues it")
    finally:
        psutil.Process(pid).send_signal(signal.SIGCONT)
    call.cancel()
    assert supervisor.waits() == [], "both have started"
