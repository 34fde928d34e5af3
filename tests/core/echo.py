"""Actors for the runtime's tests; spawned by class path, so they live in a module of their own."""

import asyncio
import os
from dataclasses import dataclass

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.ref import ActorRef


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
