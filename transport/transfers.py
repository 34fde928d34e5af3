"""A Set or a Get on its way: the request to a memory, the threads that copy, the deadline and the count."""

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeAlias, TypeVar

from ..core.base.threads import wait_ended
from ..core.pacing import pacing
from ..core.telemetry import get_logger
from .errors import TransferTimeout, TransportClosed
from .handle import PathName, Source, StateHandle, TensorSpec
from .payload import Layout
from .select import Choice
from .statistics import Chosen, PathStatistics
from .tensors.tensor_kind import Tensors

if TYPE_CHECKING:
    from .device_memory.devices import DeviceEvent

R = TypeVar("R")
S = TypeVar("S", bound=Source)
M = TypeVar("M")
log = get_logger(__name__)

# Copies of at most this much run in the event loop: with its digest, one takes about 40 microseconds in the cache, and
# a switch to a thread and back takes as long. A thread would double the time of a small state, and the loop would gain
# nothing.
INLINE_BYTES: Final = 1 << 20
# Threads of one copy. Four are as fast as the memory alone. While a device's bus writes into it they are not: then the
# digests of eight threads keep up with 38 GB/s of a bus of 55, and those of sixteen with 46.
_MOST_SHARING: Final = 16

# --------------------------------------------------------------------------- requests to a memory


@dataclass(frozen=True, slots=True)
class Offer:
    """A state as one memory offers it. ``digest``: see ``StateHandle``; None if the memory has another check."""

    sources: tuple[Source, ...]
    tensors: tuple[TensorSpec, ...]
    size_bytes: int
    digest: int | None


def handle_of(
    key: str, version: int, offers: Sequence[Offer], withheld: Mapping[PathName, str] | None = None
) -> StateHandle:
    """The handle of one state that lies in several memories. ``withheld``: see ``StateHandle``."""
    first = offers[0]
    digest = next((offer.digest for offer in offers if offer.digest is not None), None)
    sources = tuple(source for offer in offers for source in offer.sources)
    return StateHandle(key, version, first.size_bytes, digest, first.tensors, sources, dict(withheld or {}))


@dataclass(slots=True)
class Progress:
    """Words about a transfer under way, for the error after its deadline; empty if the path has nothing to say."""

    words: str = ""


@dataclass(frozen=True, slots=True)
class ReadRequest(Generic[S]):
    """The request of a Get to a path: ``tensors`` of ``handle`` (whole, or rows of them), from its ``source``."""

    handle: StateHandle
    source: S
    tensors: Sequence[TensorSpec]
    progress: Progress = field(default_factory=Progress, compare=False)

    @property
    def is_whole(self) -> bool:
        """True if all tensors of the state are read, none of them in part."""
        return self.tensors is self.handle.tensors

    @property
    def size_bytes(self) -> int:
        """Bytes to read: of a whole state with the gaps between its tensors, of parts without."""
        return self.handle.size_bytes if self.is_whole else sum(spec.size_bytes for spec in self.tensors)


Fill: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Writes all of the tensors that it is given. A cancelled call raises only after its last thread has stopped to."""


class Memory(Protocol[S]):
    """Memory that states travel by. ``StateTransport`` makes it, selects it, sets the deadlines and logs.

    The two newest versions of a key are readable, each whole; older ones are stale. A cancelled call raises only after
    the last thread has stopped to read or write its tensors, and a cancelled ``offer`` publishes nothing half written.
    """

    async def offer(
        self,
        key: str,
        tensors: Tensors,
        *,
        version: int,
        paths: Sequence[PathName],
        after: "DeviceEvent | None" = None,
    ) -> Offer:
        """Publishes ``tensors`` (any shape, device or stride; dtypes of DTYPE_BYTES) as ``version``, with a source for
        each of ``paths``: host memory has two of them, and makes one copy for both. ``after``: see
        ``StateTransport.set``.

        Raises TypeError for a tensor that can't travel, ArenaSpace if there is too little memory, TransportClosed.
        """
        ...

    async def fill(
        self, key: str, layout: Layout, fill: Fill, *, version: int, paths: Sequence[PathName]
    ) -> Offer:
        """As ``offer``, for tensors of ``layout`` that ``fill`` writes in place. Raises its errors too; nothing is
        published then."""
        ...

    async def fetch(self, request: ReadRequest[S], into: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the tensors: ``into``, overwritten, or new ones.

        Raises StateMismatch before the first byte is written if ``into`` does not fit; StaleHandle, CorruptState,
        ForeignHandle, TransportClosed, after which the contents of ``into`` are undefined.
        """
        ...

    def view(self, request: ReadRequest[S], *, checked: bool) -> AbstractAsyncContextManager[dict[str, Any]]:
        """The tensors in place, for reading, as they are inside of the context. ``checked``: the bytes are compared
        with their digests. Raises as ``fetch``, when the context is entered."""
        ...

    async def drop(self, key: str) -> None:
        """Frees the memory of a key. Its handles become stale."""
        ...

    async def close(self) -> None:
        """Frees the memory and files of ``offer``."""
        ...


class VersionedMemory(Generic[M]):
    """The pieces of memory that this process sets one key in, each for a whole version. ``lock``: held by a Set.

    ``published``: those of the two newest versions, the older one first. ``free``: neither written nor to be read.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.published: list[M] = []
        self.free: list[M] = []
        self._layout: Layout | None = None

    def layout_of(self, tensors: Mapping[str, Any]) -> Layout:
        """The layout of the last Set, if the tensors have it. Raises TypeError for a tensor that can't travel."""
        if self._layout is None or not self._layout.fits(tensors):
            self._layout = Layout.of(tensors)
        return self._layout

    def candidates(self) -> list[M]:
        """Memory for the next version: readers keep the newest one meanwhile."""
        # Two versions stay readable, not one: a handle takes a while to arrive, and the next Set may come before it.
        return [*self.free, *self.published[:-1]]

    def take(self, memory: M) -> None:
        """The next version is written there: it is in no list until then."""
        (self.free if memory in self.free else self.published).remove(memory)

    def failed(self, memory: M) -> None:
        """Nothing was published there."""
        self.free.insert(0, memory)

    def publish(self, memory: M) -> list[M]:
        """The newest version lies there; returns the memory that is of no more use."""
        self.published.append(memory)
        outdated = [*self.published[:-2], *self.free]
        del self.published[:-2]
        self.free.clear()
        return outdated

    def all(self) -> list[M]:
        """Every piece of memory of the key but one that is being written."""
        return [*self.published, *self.free]


# --------------------------------------------------------------------------- threads


class CopyWorkers:
    """Runs copies: small ones in the event loop, large ones in a pool of threads.

    The pool is not the event loop's own: copies must not wait for other blocking calls, nor delay them. ``work`` is
    called with an event and must raise TransportClosed soon after it is set.
    """

    def __init__(self, threads: int = 2, inline_bytes: int = INLINE_BYTES) -> None:
        """``inline_bytes``: of the largest copy that runs in the event loop."""
        self._inline_bytes = inline_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="flexmarl-copy")
        self._helpers = min(_MOST_SHARING, len(os.sched_getaffinity(0))) - 1
        # A second pool. A copy waits for its helpers: in one pool, copies that hold all threads would wait for helpers
        # that get none.
        self._helping = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="flexmarl-copy-help")
        self._running: dict[asyncio.Future[Any], threading.Event] = {}
        self._closed = False
        self._never = threading.Event()

    @property
    def running(self) -> int:
        """Copies in threads now."""
        return len(self._running)

    async def run(self, size_bytes: int, work: Callable[[threading.Event], R]) -> R:
        """Returns the result of ``work``. A cancellation sets the event of ``work`` and waits until it has ended.

        Raises TransportClosed after ``close``, and the errors of ``work``.
        """
        if self._closed:
            raise TransportClosed
        if size_bytes <= self._inline_bytes:
            return work(self._never)
        stop = threading.Event()
        job = self._pool.submit(work, stop)
        done = asyncio.wrap_future(job)
        self._running[done] = stop
        try:
            # Shielded: a cancelled future would leave its thread at work on memory that the caller frees or reuses.
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            stop.set()
            if not job.cancel():
                await wait_ended(done)
            raise
        finally:
            del self._running[done]

    def share(self, count: int, do: Callable[[Iterator[int]], None]) -> None:
        """Calls ``do`` in this thread and in helping ones, with an iterator for each of them: these divide the numbers
        0 .. count - 1. For use in ``work``.

        Raises the first error of ``do``; then the iterators end early. No call is running when this returns.
        """
        # Numbers are taken one by one, not divided beforehand: a thread that the system holds up delays one number, not
        # a whole share of them. A count needs no lock: its next number is one call of C.
        numbers = itertools.count()
        failed = threading.Event()

        def take() -> Iterator[int]:
            while not failed.is_set() and (number := next(numbers)) < count:
                yield number

        def help_along() -> None:
            with _set_on_error(failed):
                do(take())

        helping = [self._helping.submit(help_along) for _ in range(min(self._helpers, count - 1))]
        try:
            help_along()
        finally:
            # A helper that has not begun is taken back: all numbers are given out, and its pool may be busy for long.
            wait([job for job in helping if not job.cancel()])
        for job in helping:
            if not job.cancelled():
                job.result()

    async def close(self) -> None:
        """Stops the running copies, whose callers get TransportClosed, and ends the threads."""
        self._closed = True
        for stop in self._running.values():
            stop.set()
        try:
            if self._running:
                await asyncio.wait(list(self._running))
        finally:
            self._pool.shutdown()
            self._helping.shutdown()


@contextmanager
def _set_on_error(failed: threading.Event) -> Iterator[None]:
    ended = False
    try:
        yield
        ended = True
    finally:
        if not ended:
            failed.set()


# --------------------------------------------------------------------------- deadlines and figures


@dataclass(frozen=True, slots=True)
class Transfer:
    """``size_bytes``: of the part of the state that moves. ``memory``: the process whose memory the state lies in, or
    is copied to. ``progress``: see ``TransferTimeout``."""

    operation: Literal["set", "get"]
    key: str
    version: int
    path: PathName
    size_bytes: int
    timeout_s: float
    memory: str
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def of(cls, request: ReadRequest[Any], timeout_s: float) -> "Transfer":
        """A Get."""
        handle, source = request.handle, request.source
        numbers = request.size_bytes, timeout_s
        return cls("get", handle.key, handle.version, source.path, *numbers, source.process, request.progress)

    async def timed(self, moving: Awaitable[R]) -> tuple[R, float]:
        """Its result, and the seconds that it took. Raises TransferTimeout after the deadline, when the transfer has
        been cancelled and has ended."""
        # Not the loop's time, which is virtual in simulations: a copy takes real time there too.
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s):
                result = await moving
                if (links := pacing.get()) is not None:
                    await links.pace(self.operation, self.key, self.version, self.size_bytes, self.memory)
        except TimeoutError as expired:
            raise TransferTimeout(
                self.operation, self.key, self.version, self.path, self.size_bytes, self.timeout_s,
                self.progress.words,
            ) from expired  # fmt: skip
        return result, time.perf_counter() - started


class Transfers:
    """``chosen``: the path that the last Get of each key took."""

    def __init__(self) -> None:
        self.chosen: dict[str, Chosen] = {}
        self._totals: dict[PathName, PathStatistics] = {}
        self._logged: dict[str, str] = {}

    async def set(self, transfer: Transfer, moving: Awaitable[R]) -> R:
        """Raises TransferTimeout, and the errors of ``moving``."""
        if self._is_new(f"set {transfer.key} {transfer.path}", "offered"):
            log.debug("state offered", key=transfer.key, path=transfer.path, size_bytes=transfer.size_bytes)
        result, seconds = await transfer.timed(moving)
        totals = self._of(transfer.path)
        totals.sets += 1
        totals.set_bytes += transfer.size_bytes
        totals.set_s += seconds
        return result

    async def get(self, transfer: Transfer, choice: Choice, moving: Awaitable[R]) -> R:
        """Raises TransferTimeout, and the errors of ``moving``."""
        # Before it moves: after a deadline, too, the question is which path it was on.
        self.chosen[transfer.key] = Chosen(choice.path, choice.reason, choice.refused)
        if self._is_new(f"get {transfer.key}", f"{choice.path}: {choice.reason}"):
            report = log.warning if choice.is_downgrade else log.info
            report(
                "transfer path chosen",
                key=transfer.key,
                path=choice.path,
                reason=choice.reason,
                refused=choice.refused,
                size_bytes=transfer.size_bytes,
            )
        result, seconds = await transfer.timed(moving)
        totals = self._of(transfer.path)
        totals.gets += 1
        totals.get_bytes += transfer.size_bytes
        totals.get_s += seconds
        return result

    def totals(self) -> dict[PathName, PathStatistics]:
        """A copy, of the paths that were used."""
        return {path: replace(totals) for path, totals in self._totals.items()}

    def _of(self, path: PathName) -> PathStatistics:
        return self._totals.setdefault(path, PathStatistics())

    def _is_new(self, transfer: str, how: str) -> bool:
        """False if it went as the last time, as at almost every optimizer step."""
        # A line for each transfer would be thousands that are alike; a path that changes is the event.
        is_new = self._logged.get(transfer) != how
        self._logged[transfer] = how
        return is_new
