"""The way of an actor's records into the run's file of trajectories: beside the actor's work, never before it.

    add       puts a record into a queue of bounded size; without room the record is dropped, and counted
    run       packs what came within half a second in a thread, and sends it; the next call begins when this one is
              answered. A call for each record would cost both sides more than the records themselves

The launcher keeps the file (``launch/run_folder/samples/archive.py``): it is on the run's own host, has no other work,
and outlives every actor. The queue is long enough for a disk that pauses; a launcher that is stopped (ctrl-Z) costs
records, and delays nothing.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from ..core.errors import FlexmarlError
from ..core.telemetry import get_logger

QUEUE_BYTES: Final = 64 * 2**20
_CALL_BYTES: Final = 2 * 2**20
_LINGER_S: Final = 0.5
ANSWER_TIMEOUT_S: Final = 60.0

log = get_logger(__name__)

Work = Callable[[], list[bytes]]
RunBlocking = Callable[[Work], Awaitable[list[bytes]]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordKind(Generic[T]):
    """Records of one kind. ``words``: for people, such as ``trajectories``. ``pack``: is called in a thread. ``keep``:
    one of the calls of ``ArchiveApi``, with packed records and the number of entries that were dropped before."""

    words: str
    pack: Callable[[T], bytes]
    keep: Callable[[list[bytes], int], Awaitable[int]]


class _Waiting(NamedTuple, Generic[T]):
    record: T
    size: int
    entries: int


class RecordQueue(Generic[T]):
    """``dropped``: entries of this actor's records that are not in the file."""

    def __init__(self, kind: RecordKind[T], run_blocking: RunBlocking, most_bytes: int = QUEUE_BYTES) -> None:
        """``run_blocking``: as of an actor's system."""
        self._kind = kind
        self._run_blocking = run_blocking
        self._most_bytes = most_bytes
        self._waiting: deque[_Waiting[T]] = deque()
        self._bytes = 0
        self._unreported = 0
        self._changed = asyncio.Event()
        self._is_full = asyncio.Event()
        """There is enough for a call."""
        self._logged = False
        self.dropped = 0

    def add(self, record: T, size: int, entries: int) -> None:
        """``size``: of the record, in bytes, nearly. ``entries``: its number of trajectories, say, by which a loss is
        counted."""
        if self._bytes + size > self._most_bytes:
            self._drop(entries, "the queue is full")
            self._unreported += entries
            return
        self._waiting.append(_Waiting(record, size, entries))
        self._bytes += size
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
            self._drop(sum(waiting.entries for waiting in self._waiting), f"not sent within {limit_s:g} s")

    async def _send(self) -> None:
        """Sends about 2 MiB of the records. They stay in the queue until they are answered: ``drain`` sends again what
        a cancelled call has not."""
        batch: list[_Waiting[T]] = []
        size = 0
        for waiting in self._waiting:
            if batch and size + waiting.size > _CALL_BYTES:
                break
            batch.append(waiting)
            size += waiting.size
        records = await self._run_blocking(lambda: [self._kind.pack(waiting.record) for waiting in batch])
        unreported, self._unreported = self._unreported, 0
        try:
            refused = await self._kind.keep(records, unreported)
        except FlexmarlError as error:
            self._unreported += unreported
            refused, problem = sum(waiting.entries for waiting in batch), str(error)
        else:
            problem = "the file takes no more"
        if refused:
            self._drop(refused, problem)
        for _ in batch:
            self._waiting.popleft()
        self._bytes -= size
        if self._bytes < _CALL_BYTES:
            self._is_full.clear()

    def _drop(self, entries: int, problem: str) -> None:
        self.dropped += entries
        if not self._logged and entries:
            self._logged = True
            log.warning(f"{self._kind.words} are not recorded", count=entries, problem=problem)
