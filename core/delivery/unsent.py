"""Requests of this side that wait for credit."""

import asyncio
import math
from collections.abc import Sequence
from typing import TypeAlias

from ..call import Call
from ..protocol.messages import RequestHead
from .streams import StreamReader

Packed: TypeAlias = tuple[RequestHead, bytes, Sequence[memoryview]]
"""A request: the fields that it shares with others to that endpoint, its own, and its buffers."""


class Unsent:
    """A request that waits for credit, packed already. ``reader``: of a stream's items."""

    __slots__ = ("call", "deadline", "head", "packed", "reader", "timer")

    def __init__(self, call: Call, packed: Packed, reader: StreamReader | None = None) -> None:
        """``call``: done when its reply arrives; in case of a message without a reply, or a stream, when it is sent."""
        self.call = call
        self.head = packed[0]
        self.packed = packed
        self.reader = reader
        self.deadline = math.inf
        self.timer: asyncio.TimerHandle | None = None

    def done(self) -> bool:
        return self.call.done()

    def set_exception(self, error: BaseException) -> None:
        self.settle()
        self.call.set_exception(error)

    def settle(self) -> None:
        """It waits no longer."""
        self.call.unsent = None
        if self.timer is not None:
            self.timer.cancel()
