"""Actors for the runtime's tests; spawned by class path, so they live in a module of their own."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexmarl.core.actor import Actor, DeadActor, endpoint
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.system_api import SystemApi


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    labels: tuple[str, ...] = ()


class Echo(Actor):
    def __init__(self, greeting: str = "hello") -> None:
        self._greeting = greeting
        self.hanging = 0
        self.heard: list[int] = []

    @endpoint
    async def greet(self, name: str) -> str:
        return f"{self._greeting} {name}"

    @endpoint
    async def move(self, point: Point, by: int = 1) -> Point:
        return Point(point.x + by, point.labels)

    @endpoint
    async def count(self, up_to: int) -> AsyncIterator[int]:
        for number in range(up_to):
            yield number

    @endpoint
    async def leave(self, words: str) -> str:
        """Has its process end in good order."""
        await self.system.ref("system", self.system.address, SystemApi).api.stop()
        return words

    @endpoint
    async def wrong_result(self) -> int:
        return "no number"  # type: ignore[return-value]

    @endpoint
    async def fail(self, message: str) -> None:
        raise KeyError(message)

    @endpoint
    async def half_a_character(self) -> str:
        return "\ud83d"

    @endpoint
    async def fail_with_half_a_character(self) -> None:
        raise ValueError("\ud83d")

    @endpoint
    async def fail_without_words(self) -> None:
        raise Wordless

    @endpoint
    async def hang(self) -> None:
        self.hanging += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.hanging -= 1

    @endpoint
    async def calls_hanging(self) -> int:
        return self.hanging

    @endpoint
    async def hear(self, number: int) -> None:
        self.heard.append(number)

    @endpoint
    async def all_heard(self) -> list[int]:
        return self.heard

    @endpoint
    async def greet_through(self, other: "ActorRef[Echo]", name: str) -> str:
        return await other.api.greet(name)

    @endpoint
    async def exit(self, status: int) -> None:
        os._exit(status)

    @endpoint
    async def crash_in_background(self) -> None:
        async def crash() -> None:
            raise RuntimeError("background work failed")

        self.background(crash(), "crash")

    @endpoint
    async def record(self, name: str) -> None:
        now = self.system.clock()
        self.system.spans.add(now, now, ("lane", "kind", "", "", ""), name)

    async def not_an_endpoint(self) -> None: ...


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class RefusesWithoutWords(Actor):
    async def on_start(self) -> None:
        raise Wordless


class RefusesToStart(Actor):
    async def on_start(self) -> None:
        raise ValueError("nothing to serve")


class Worker(Actor):
    """Can be made to die in many ways, and says which incarnation it is. ``diary``: a file that outlives it."""

    def __init__(self, diary: str, starts: int = 1000) -> None:
        """``starts``: from this one on ``on_start`` fails."""
        self._diary = Path(diary)
        self._starts = starts
        self.deaths: list[DeadActor] = []

    async def on_start(self) -> None:
        self.write(f"start {self.ref.name}")
        if self._diary.read_text().count(f"start {self.ref.name}\n") > self._starts:
            raise ValueError("started once too often")

    async def on_stop(self) -> None:
        self.write(f"stop {self.ref.name}")

    def write(self, line: str) -> None:
        with self._diary.open("a") as diary:
            diary.write(line + "\n")

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def incarnation(self) -> int:
        return self.system.incarnation

    @endpoint
    async def directory(self) -> str:
        return str(self.system.directory)

    @endpoint
    async def hang(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    async def crash(self) -> None:
        async def crash() -> None:
            raise RuntimeError("crashed")

        self.background(crash(), "crash")

    @endpoint
    async def find(self, name: str) -> ActorRef[Any]:
        return await self.system.lookup(name, Worker)

    @endpoint
    async def watch_it(self, ref: "ActorRef[Worker]") -> None:
        self.watch(ref)

    @endpoint
    async def watchers(self) -> int:
        return len(self._runtime.monitors.undelivered())

    @endpoint
    async def seen(self) -> list[DeadActor]:
        return self.deaths

    async def on_dead(self, dead: DeadActor) -> None:
        self.deaths.append(dead)


class SlowToStart(Worker):
    """Starts once the file beside its diary is there."""

    async def on_start(self) -> None:
        self.write("starting")
        while not self._diary.with_name("gate").exists():
            await asyncio.sleep(0.01)


class NeverReady(Actor):
    async def on_start(self) -> None:
        await asyncio.Event().wait()
