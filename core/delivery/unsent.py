"""Requests of this side that wait for credit."""

import asyncio
import math
from collections.abc import Sequence
from typing import TypeAlias

from ..call import Call
from ..protocol.open_requests import Callee
from .streams import StreamReader

Packed: TypeAlias = tuple[bytes, Sequence[memoryview], int]
"""A request: the fields that are its own, its buffers, and the size of both in bytes."""


class Unsent:
    """A request that waits for credit, packed already. ``reader``: of a stream's items."""

    __slots__ = ("call", "callee", "deadline", "packed", "reader", "timer")

    def __init__(
        self, call: Call, callee: Callee, packed: Packed, reader: StreamReader | None = None
    ) -> None:
        """``call``: done when its reply arrives; in case of a message without a reply, or a stream, when it is sent."""
        self.call = call
        self.callee = callee
        self.packed = packed
        self.reader = reader
        self.deadline = math.inf
        self.timer: asyncio.TimerHandle | None = None

    @property
    def size_bytes(self) -> int:
        return self.packed[2]

    def done(self) -> bool:
        return self.call.done()

    def set_exception(self, error: Exception, /) -> None:
        self.settle()
        self.call.set_exception(error)

    def settle(self) -> None:
        """It waits no longer."""
        self.call.unsent = None
        if self.timer is not None:
            self.timer.cancel()
