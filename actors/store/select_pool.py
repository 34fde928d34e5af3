"""Expressions of clients, evaluated beside the store's other work: few at a time, in threads.

    at_once       this many are evaluated at the same time; SQLite releases the GIL meanwhile
    waiting       this many more wait, and are taken in the order of their arrival; further ones are refused
    timeout_s     an evaluation that takes longer is ended

The rows are read on the store's event loop, a small part per tick, because they change there.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

from ..errors import TooManySelects
from ..messages import Selection
from .query import select

# About 0.1 ms of the event loop.
_ROWS_PER_TICK: Final = 32

Rows = Iterator[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class SelectLimits:
    """``at_once``: threads; ``waiting``: expressions that wait for one; ``timeout_s``: of an evaluation, without the
    wait. A config does not have them: they protect the run from its clients."""

    at_once: int = 1
    waiting: int = 32
    timeout_s: float = 5.0


class SelectPool:
    """For one event loop. ``run_blocking``: as of an actor's system."""

    def __init__(self, limits: SelectLimits, run_blocking: Callable[..., Awaitable[Selection]]) -> None:
        self._run_blocking = run_blocking
        self._limits = limits
        self._free = asyncio.Semaphore(limits.at_once)
        self.running = self.waiting = 0

    async def select(
        self, columns: Mapping[str, str], rows: Callable[[], Rows], where: str, limit: int
    ) -> Selection:
        """As ``query.select``. ``rows``: called when it is this expression's turn; what it returns is read in several
        ticks.

        Raises StoreError as ``query.select`` does, SelectTimeout among them, and TooManySelects.
        """
        if self._free.locked() and self.waiting >= self._limits.waiting:
            raise TooManySelects(self.running, self.waiting)
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            return await self._evaluate(columns, rows(), where, limit)
        finally:
            self.running -= 1
            self._free.release()

    async def _evaluate(self, columns: Mapping[str, str], rows: Rows, where: str, limit: int) -> Selection:
        copied: list[tuple[Any, ...]] = []
        while part := list(islice(rows, _ROWS_PER_TICK)):
            copied += part
            await asyncio.sleep(0)
        given_up = threading.Event()
        work = partial(
            select,
            columns,
            copied,
            where,
            limit=limit,
            timeout_s=self._limits.timeout_s,
            is_given_up=given_up.is_set,
        )
        return await self._run_blocking(work, stop=given_up)  # a cancelled call's thread is free at once
