"""Takes the spans of all processes of a run, regularly, and has them written."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from ...core.base.texts import text_of
from ...core.spans import SpanBatch
from ..run_folder.spans.span_log import SpanLog
from .run_supervision import RunSupervision

INTERVAL_S: Final = 1.0
_ANSWER_TIMEOUT_S: Final = 10.0
_LAST_TIMEOUT_S: Final = 2.0


class SpanKeeper:
    def __init__(
        self,
        supervision: RunSupervision,
        log: SpanLog,
        hosts: Callable[[], Mapping[str, str]],
        run_blocking: Callable[..., Awaitable[Any]],
        interval_s: float = INTERVAL_S,
    ) -> None:
        """``hosts``: the host of each process, by name. ``run_blocking``: ``ActorSystem.run_blocking``. ``interval_s``:
        seconds of the loop's time between two rounds."""
        self._supervision, self._log, self._hosts = supervision, log, hosts
        self._run_blocking, self._interval_s = run_blocking, interval_s
        self._received: dict[str, int] = {}
        self._taking = asyncio.Lock()
        self._asking: asyncio.Task[dict[str, SpanBatch]] | None = None
        self._is_ending = False

    async def run(self) -> None:
        """Takes spans until it is cancelled. If none are to be kept, the processes hear that they need record none."""
        while not self._is_ending:
            await self._take(_ANSWER_TIMEOUT_S)
            await asyncio.sleep(self._interval_s)

    async def end(self, warn: Callable[[str], None]) -> None:
        """Takes the last spans, of all processes that answer soon. ``warn``: gets a line if that fails. It raises
        nothing, since the result or the error of the run is to be seen."""
        self._is_ending = True
        if self._asking is not None:  # a process that hangs would hold those of all others
            self._asking.cancel()
        try:
            await self._take(_LAST_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  # said by warn
            warn(f"the last spans are not recorded: {type(error).__name__}: {text_of(error)}")

    async def _take(self, timeout_s: float) -> None:
        async with self._taking:
            asking = self._supervision.process_spans(self._log.share, self._received, timeout_s)
            self._asking = asyncio.create_task(asking, name="spans")
            try:
                await asyncio.wait([self._asking])
            finally:
                self._asking.cancel()
            if self._asking.cancelled():
                return  # nothing is lost: a batch stays with its process until the next call has its number
            batches, self._asking = self._asking.result(), None
            hosts = self._hosts()
            for process, batch in batches.items():
                self._received[process] = batch.number
                # In a thread: the loop is that of supervision, and the disk may be a slow one of the network.
                await self._run_blocking(self._log.add, process, hosts.get(process, ""), batch)
