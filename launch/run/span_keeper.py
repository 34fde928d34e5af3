"""Takes the spans of all processes of a run, once a second, and has them written."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from ...core.base.threads import in_thread
from ..run_folder.spans.span_log import SpanLog
from .run_supervision import RunSupervision

_INTERVAL_S: Final = 1.0
_ANSWER_TIMEOUT_S: Final = 10.0
_LAST_TIMEOUT_S: Final = 2.0


class SpanKeeper:
    """``hosts``: the host of each process, by name."""

    def __init__(
        self, supervision: RunSupervision, log: SpanLog, hosts: Callable[[], Mapping[str, str]]
    ) -> None:
        self._supervision, self._log, self._hosts = supervision, log, hosts
        self._received: dict[str, int] = {}
        self._taking = asyncio.Lock()

    async def run(self) -> None:
        """Takes spans until it is cancelled. If none are to be kept, the processes hear that they need record none."""
        while True:
            await self._take(_ANSWER_TIMEOUT_S)
            await asyncio.sleep(_INTERVAL_S)

    async def end(self) -> None:
        """Takes the last spans, of all processes that answer soon."""
        await self._take(_LAST_TIMEOUT_S)

    async def _take(self, timeout_s: float) -> None:
        async with self._taking:
            batches = await self._supervision.process_spans(self._log.share, self._received, timeout_s)
            hosts = self._hosts()
            for process, batch in batches.items():
                self._received[process] = batch.number
                # In a thread: the loop is that of supervision, and the disk may be a slow one of the network.
                await in_thread(self._log.add, process, hosts.get(process, ""), batch)
