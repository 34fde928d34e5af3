"""The actors that the runtime's contract is tested with."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import FlexmarlError
from flexmarl.core.protocol.codec import Buffer
from flexmarl.core.ref import ActorRef


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    labels: tuple[str, ...] = ()


class Refused(FlexmarlError):
    """With fields, one of which need not fit."""

    def __init__(self, number: int, points: tuple[Point, ...] = (), source: Any = None) -> None:
        super().__init__(f"number {number} is refused, for {len(points)} points")
        self.number = number
        self.points = points
        self.source = source


class Late(FlexmarlError):
    """Its text is all there is."""


class LateAgain(Late):
    """Declared nowhere."""


class Misread:
    """Classes of the same names as a caller might have them that knows others."""

    class Refused(FlexmarlError):
        def __init__(self, number: str) -> None:
            self.number = number


class Panic(BaseException):
    """As PyO3's PanicException, which a Rust library raises: no Exception."""


class Subject(Actor):
    """Does what it is asked and remembers it."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.began: list[int] = []
        self.produced = 0
        self.hanging = 0
        self.streaming = 0
        self.filled = 0
        self.added: dict[int, int] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    @endpoint
    async def move(self, point: Point, by: int = 1) -> Point:
        return Point(point.x + by, point.labels)

    @endpoint
    async def fail(self, message: str) -> None:
        raise KeyError(message)

    @endpoint
    async def panic(self, message: str, wait_s: float = 0.0) -> None:
        if wait_s:
            await asyncio.sleep(wait_s)
        raise Panic(message)

    @endpoint
    async def close_generator(self, wait_s: float = 0.0) -> None:
        if wait_s:
            await asyncio.sleep(wait_s)
        raise GeneratorExit("a generator's own end")

    @endpoint
    async def count_and_close(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number
        raise GeneratorExit("a generator's own end")

    @endpoint
    async def count_and_panic(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number
        raise Panic("no more numbers")

    @endpoint(raises=(Refused, Late))
    async def refuse(self, number: int, how: str = "") -> None:
        """Raises what ``how`` says."""
        match how:
            case "late":
                raise Late(f"number {number}")
            case "late again":
                raise LateAgain(f"number {number}")
            case "undeclared":
                raise LookupError(f"number {number}")
            case "unsendable":
                raise Refused(number, (), object())
            case "unholdable":
                raise Refused(number, (), {(1, 2): 3})
            case "too large":
                raise Refused(number, (), bytes(2**26))
        raise Refused(number, (Point(number), Point(2, ("a", "b"))))

    @endpoint(raises=(Refused,))
    async def refuse_slowly(self, number: int) -> None:
        self.added[number] = self.added.get(number, 0) + 1
        await asyncio.sleep(0.05)
        raise Refused(number, (Point(self.added[number]),))

    @endpoint(raises=(Refused,))
    async def count_and_refuse(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number
        raise Refused(to)

    @endpoint(raises=(Refused,))
    async def refuse_through(self, other: ActorRef["Subject"], number: int) -> None:
        await other.api.refuse(number)

    @endpoint
    async def hang(self) -> None:
        self.hanging += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.hanging -= 1

    @endpoint
    async def hear(self, number: int) -> None:
        self.heard.append(number)

    @endpoint
    async def hear_slowly(self, number: int) -> None:
        """In order, one at a time, and only while the gate is open."""
        self.began.append(number)
        await self.gate.wait()
        self.heard.append(number)

    @endpoint
    async def take(self, data: bytes) -> int:
        await self.gate.wait()
        return len(data)

    @endpoint
    async def fill(self, size_bytes: int) -> bytes:
        self.filled += 1
        return bytes(size_bytes)

    @endpoint
    async def buffers(self, sizes: list[int]) -> AsyncIterator[Buffer]:
        for size in sizes:
            yield Buffer(bytes(size))

    @endpoint
    async def unholdable(self) -> Any:
        return {(1, 2): 3}

    @endpoint
    async def count(self, to: int) -> AsyncIterator[int]:
        self.streaming += 1
        try:
            for number in range(to):
                self.produced += 1
                yield number
        finally:
            self.streaming -= 1

    @endpoint
    async def count_and_fail(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number
        raise ValueError("no more numbers")

    @endpoint
    async def count_and_hang(self, to: int) -> AsyncIterator[int]:
        self.streaming += 1
        try:
            for number in range(to):
                yield number
            await asyncio.Event().wait()
        finally:
            self.streaming -= 1

    @endpoint
    async def wrong_result(self) -> int:
        return "no number"  # type: ignore[return-value]

    @endpoint
    async def wrong_items(self) -> AsyncIterator[int]:
        yield "no number"  # type: ignore[misc]

    @endpoint
    async def mirror(self, buffer: Buffer) -> Buffer:
        return buffer

    @endpoint
    async def ask_through(self, other: ActorRef["Subject"], point: Point) -> Point:
        return await other.api.move(point)

    @endpoint
    async def add(self, key: int) -> int:
        """The number of its runs for ``key``."""
        self.added[key] = self.added.get(key, 0) + 1
        return self.added[key]

    @endpoint
    async def add_slowly(self, key: int) -> int:
        self.added[key] = self.added.get(key, 0) + 1
        await asyncio.sleep(0.05)
        return self.added[key]


class MisreadSubject(Protocol):
    """The API of ``Subject`` as a caller has it that declares other errors."""

    @endpoint(raises=(Misread.Refused,))
    async def refuse(self, number: int, how: str = "") -> None: ...

    @endpoint
    async def refuse_slowly(self, number: int) -> None: ...
