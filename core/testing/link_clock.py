"""Transfers over shared ports, on the clock of the running loop: usually of virtual time."""

import asyncio
import itertools
import math
from collections.abc import Mapping

from .shared_ports import SharedPorts


class LinkClock:
    """``bytes_s``: the bandwidth of each port. For one loop."""

    def __init__(self, bytes_s: Mapping[str, float]) -> None:
        """Raises ValueError for a bandwidth that is not above 0."""
        self._ports = SharedPorts[int](bytes_s)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.Handle | None = None
        self._is_changed = False

    @property
    def carried_bytes(self) -> Mapping[str, float]:
        """Bytes that have crossed each port, at the last change."""
        return self._ports.carried_bytes

    async def transfer(self, size_bytes: float, uses: Mapping[str, float], latency_s: float = 0.0) -> None:
        """Returns when the bytes have arrived; a cancelled one leaves its ports at once. ``uses``: see
        ``SharedPorts.begin``."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        self._ports.begin(number, size_bytes, uses, loop.time(), latency_s)
        self._waiting[number] = arrived = loop.create_future()
        self._note_change()
        try:
            await arrived
        finally:
            if self._waiting.pop(number, None) is not None:
                self._ports.stop(number, loop.time())
                self._note_change()

    def _note_change(self) -> None:
        """Sets a new timer, once for all changes of this moment."""
        if not self._is_changed:
            self._is_changed = True
            asyncio.get_running_loop().call_soon(self._set_timer)

    def _set_timer(self) -> None:
        self._is_changed = False
        if self._timer is not None:
            self._timer.cancel()
        due_s = self._ports.due_s
        self._timer = None if due_s == math.inf else asyncio.get_running_loop().call_at(due_s, self._deliver)

    def _deliver(self) -> None:
        for number in self._ports.ended(asyncio.get_running_loop().time()):
            arrived = self._waiting.pop(number)
            if not arrived.done():
                arrived.set_result(None)
        self._note_change()
