"""The way of a worker's recorded trajectories into the run's file: beside the work of its rollouts, never before it.

    add       packs a record, and puts it into a queue of bounded size; without room the record is dropped, and counted
    run       compresses what came within half a second in a thread, and sends it; the next call begins when this one is
              answered. A call for each group would cost both sides more than the records themselves

The launcher keeps the file (``launch/run_folder/samples/archive.py``): it is on the run's own host, has no other work,
and outlives every worker. The queue is long enough for a disk that pauses; a launcher that is stopped (ctrl-Z) costs
records, and delays nothing.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from ...core.errors import FlexmarlError
from ...core.ref import ActorRef
from ...core.telemetry import get_logger
from ..messages import ArchiveApi
from ..recorded_trajectory import Record, RecordedTrajectory, compress_record, pack_record

QUEUE_BYTES: Final = 64 * 2**20
_CALL_BYTES: Final = 2 * 2**20
_LINGER_S: Final = 0.5
_ANSWER_TIMEOUT_S: Final = 60.0

log = get_logger(__name__)

Work = Callable[[], list[bytes]]
RunBlocking = Callable[[Work], Awaitable[list[bytes]]]


class RecordQueue:
    """``dropped``: trajectories of this worker that are not in the file."""

    def __init__(
        self, archive: ActorRef[ArchiveApi], run_blocking: RunBlocking, most_bytes: int = QUEUE_BYTES
    ) -> None:
        """``run_blocking``: as of an actor's system."""
        self._archive = archive.within(_ANSWER_TIMEOUT_S)
        self._run_blocking = run_blocking
        self._most_bytes = most_bytes
        self._waiting: deque[Record] = deque()
        self._bytes = 0
        self._unreported = 0
        self._changed = asyncio.Event()
        self._is_full = asyncio.Event()
        """There is enough for a call."""
        self._logged = False
        self.dropped = 0

    def add(self, trajectories: Sequence[RecordedTrajectory]) -> None:
        """At least one trajectory, all of one query and step."""
        record = pack_record(trajectories)
        if self._bytes + record.size > self._most_bytes:
            self._drop(len(trajectories), "the queue is full")
            self._unreported += len(trajectories)
            return
        self._waiting.append(record)
        self._bytes += record.size
        self._changed.set()
        if self._bytes >= _CALL_BYTES:
            self._is_full.set()

    async def run(self) -> None:
        """Sends records until it is cancelled."""
        while True:
            while not self._waiting:
                self._changed.clear()
                await self._changed.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    await self._is_full.wait()
            await self._send()

    async def drain(self, limit_s: float) -> None:
        """Sends what is left, within ``limit_s``. To be called when ``run`` has ended."""
        try:
            async with asyncio.timeout(limit_s):
                while self._waiting:
                    await self._send()
        except TimeoutError:
            self._drop(sum(record.trajectories for record in self._waiting), f"not sent within {limit_s:g} s")

    async def _send(self) -> None:
        """Sends about 2 MiB of the records. They stay in the queue until they are answered: ``drain`` sends again what
        a cancelled call has not."""
        batch: list[Record] = []
        size = 0
        for record in self._waiting:
            if batch and size + record.size > _CALL_BYTES:
                break
            batch.append(record)
            size += record.size
        records = await self._run_blocking(lambda: [*map(compress_record, batch)])
        unreported, self._unreported = self._unreported, 0
        try:
            refused = await self._archive.keep(records, unreported)
        except FlexmarlError as error:
            self._unreported += unreported
            refused, problem = sum(record.trajectories for record in batch), str(error)
        else:
            problem = "the file takes no more"
        if refused:
            self._drop(refused, problem)
        for _ in batch:
            self._waiting.popleft()
        self._bytes -= size
        if self._bytes < _CALL_BYTES:
            self._is_full.clear()

    def _drop(self, trajectories: int, problem: str) -> None:
        self.dropped += trajectories
        if not self._logged and trajectories:
            self._logged = True
            log.warning("trajectories are not recorded", trajectories=trajectories, problem=problem)
