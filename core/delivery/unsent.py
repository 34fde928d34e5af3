"""Requests of this side that wait for credit."""

import asyncio
import math
from collections.abc import Sequence

from ..call import Call
from ..protocol.envelopes import Kind
from .streams import StreamReader


class Unsent:
    """A request that waits for credit, packed already. ``reader``: of a stream's items."""

    __slots__ = (
        "actor", "buffers", "call", "deadline", "endpoint", "fields", "kind", "reader", "timeout_s", "timer"
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        kind: Kind,
        actor: str,
        endpoint: str,
        timeout_s: float,
        fields: bytes,
        buffers: Sequence[memoryview],
        reader: StreamReader | None = None,
    ) -> None:
        """``call``: done when its reply arrives; in case of a message without a reply, or a stream, when it is sent."""
        self.call = call
        self.kind = kind
        self.actor = actor
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.fields = fields
        self.buffers = buffers
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
