"""Changes of the runs' folders, for the pages that are open. While no page is open, no folder is read."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Final

from ....core.errors import FlexmarlError
from .recorded_run import RecordedRun

MOST_LISTENERS: Final = 200
_LOOK_S: Final = 1.0
_QUIET_S: Final = 15.0
"""A connection without a byte for longer may be closed on its way."""


class TooManyListeners(FlexmarlError):
    """As many pages are open as one server serves."""

    def __init__(self) -> None:
        super().__init__(
            f"{MOST_LISTENERS} pages of this server are open: close one, and load this one again"
        )


class Changes:
    """Looks at the folders while a page is open: once a second, for any number of pages."""

    def __init__(self, runs: Sequence[RecordedRun]) -> None:
        self._runs = runs
        self._listeners = 0
        self._looking = asyncio.Lock()
        self._revisions: list[int] = []
        self._looked_s = -_LOOK_S

    async def revisions(self, at_most_s: float = 0.0) -> list[int]:
        """Those of the runs, of a look that began at most so many seconds ago."""
        clock = asyncio.get_running_loop().time
        asked_s = clock() - at_most_s
        async with self._looking:
            if self._looked_s < asked_s or not self._revisions:
                self._looked_s = clock()
                self._revisions = [await asyncio.to_thread(run.refresh) for run in self._runs]
            return self._revisions

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Counts a page that is open. Raises TooManyListeners."""
        if self._listeners >= MOST_LISTENERS:
            raise TooManyListeners
        self._listeners += 1
        try:
            yield
        finally:
            self._listeners -= 1

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[AsyncGenerator[list[int]]]:
        """The revisions now and after every change; an empty list if there was none for a while."""
        async with aclosing(self._watch()) as changes:
            yield changes

    async def _watch(self) -> AsyncGenerator[list[int]]:
        loop = asyncio.get_running_loop()
        seen: list[int] = []
        said_s = loop.time()
        while True:
            revisions = await self.revisions(_LOOK_S)
            if revisions != seen:
                seen, said_s = revisions, loop.time()
                yield seen
            elif loop.time() - said_s > _QUIET_S:
                said_s = loop.time()
                yield []
            await asyncio.sleep(_LOOK_S)
