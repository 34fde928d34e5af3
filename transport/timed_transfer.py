"""A transfer with a deadline."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from .errors import TransferTimeout

R = TypeVar("R")


class TimedTransfer:
    """``seconds``: the time that it took."""

    def __init__(
        self, operation: str, key: str, version: int, path: str, size_bytes: int, timeout_s: float
    ) -> None:
        self._what = operation, key, version, path, size_bytes, timeout_s
        self.seconds = 0.0

    async def result(self, transfer: Awaitable[R]) -> R:
        """Raises TransferTimeout after the deadline, when the transfer has been cancelled and has ended."""
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._what[-1]):
                result = await transfer
        except TimeoutError as expired:
            raise TransferTimeout(*self._what) from expired
        self.seconds = time.perf_counter() - started
        return result
