"""The order in which concurrent calls arrived, for a part of them that has to keep it."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Place:
    """A call's place in an ``ArrivalOrder``."""

    def __init__(self, line: deque["Place"]) -> None:
        self._line = line
        self._is_first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait_turn(self) -> None:
        """Returns when the places before have been left, and leaves this one.

        The next call continues at a later turn of the event loop: work that the caller begins before it awaits anything
        else is begun in order, and the calls work at the same time again.
        """
        await self._is_first
        self.leave()

    def leave(self) -> None:
        """Gives up the place. Does nothing if it was left before."""
        if self in self._line:
            self._line.remove(self)
            if self._line:
                self._line[0].come_first()

    def come_first(self) -> None:
        """Makes the turn come, as this place is the first."""
        if not self._is_first.done():  # by a call that was cancelled and has not left yet
            self._is_first.set_result(None)


class ArrivalOrder:
    """A line of calls. Unlike a lock it lets them work at the same time until one needs all others before it gone."""

    def __init__(self) -> None:
        self._line: deque[Place] = deque()

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A place at the end of the line, until its turn was waited for or the block ends."""
        place = Place(self._line)
        self._line.append(place)
        self._line[0].come_first()
        try:
            yield place
        finally:
            place.leave()
