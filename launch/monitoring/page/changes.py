"""Changes of the runs' folders, for the pages that are open. While no page is open, no folder is read."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final

from .recorded_run import RecordedRun

_LOOK_S: Final = 0.5
_QUIET_S: Final = 15.0
"""A connection without a byte for longer may be closed on its way."""


class Changes:
    """Looks at the folders while a page is open."""

    def __init__(self, runs: Sequence[RecordedRun]) -> None:
        self._runs = runs

    async def revisions(self) -> list[int]:
        """Those of the runs, up to date."""
        return [await asyncio.to_thread(run.refresh) for run in self._runs]

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[AsyncGenerator[list[int]]]:
        """The revisions now and after every change; an empty list if there was none for a while."""
        async with aclosing(self._watch()) as news:
            yield news

    async def _watch(self) -> AsyncGenerator[list[int]]:
        loop = asyncio.get_running_loop()
        seen: list[int] = []
        said_s = loop.time()
        while True:
            revisions = await self.revisions()
            if revisions != seen:
                seen, said_s = revisions, loop.time()
                yield seen
            elif loop.time() - said_s > _QUIET_S:
                said_s = loop.time()
                yield []
            await asyncio.sleep(_LOOK_S)
