"""The order in which concurrent calls arrived, for a part of them that has to keep it."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class ArrivalOrder:
    """A line of calls. Unlike a lock it lets them work at the same time until one needs all others before it gone."""

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()

    @contextmanager
    def place(self) -> Iterator[asyncio.Future[None]]:
        """A place at the end of the line, until the block ends. The future is done when the places before it have
        ended."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        self._call_first()
        try:
            yield turn
        finally:
            self._line.remove(turn)
            self._call_first()

    def _call_first(self) -> None:
        if self._line and not self._line[0].done():
            self._line[0].set_result(None)
