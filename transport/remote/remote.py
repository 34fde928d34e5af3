"""States of other hosts, copied to this one.

    owner's host                                        reader's host
    Set -> block           -> server threads  ==TCP==>  the first reader: block -> its tensors
        -> readers of its own host                      all other readers:  "   -> their tensors

The owner copies nothing: it serves the block that it has set for readers of its own host, at the door that its
``HostMemory`` opens (``server.py``). The reader receives straight into a block of its host (``fetch.py``), compares the
digests and publishes the block (``NodeCopies``); from then on the version is read as any other one of shared memory.
The next host may receive it from there, while it arrives or later (``relays.py``). A fetch that fails leaves the
destination, and the older version on this host, as they were.
"""

import asyncio
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from ...core.base.texts import text_of
from ...core.base.threads import wait_ended
from ...core.telemetry import get_logger
from ..errors import ForeignHandle, TransportClosed
from ..handle import ShmSource, StateHandle, TcpSource
from ..host_memory.block import Block, Share, is_locked, populate, try_lock
from ..payload import table_digest
from ..select import Place
from ..statistics import NetworkStatistics
from ..transfers import INLINE_BYTES, CopyWorkers, ReadRequest
from .bulk import Bulk
from .fetch import RELAY_S, Fetch
from .relays import Arrival, Relay
from .server import BulkServer

# Between two looks if another process still fetches a version. Not a lock that waits (F_OFD_SETLKW): it would take a
# thread for each reader that waits, and no deadline or cancellation would end it.
_POLL_S: Final = 0.005
LOCK_FILE: Final = "copies.lock"
_NO_RELAYS_S: Final = 60.0
"""Seconds for which a process that has given a relay up reads from owners alone."""
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """A state of another host in a block of this one. ``is_verified``: this process has received it just now, and has
    compared every chunk with its digest."""

    source: ShmSource
    is_verified: bool


class Remote:
    """The reader's side of the exchange with other hosts. ``bulk``: how both sides of this process exchange bytes.
    ``statistics``: of both."""

    def __init__(self, place: Place, directory: Path, bulk: Bulk) -> None:
        self._place = place
        self.bulk = bulk
        self._copies = NodeCopies(directory, place)
        self._workers = CopyWorkers()  # a fetch lasts: it must not keep copies of this host waiting
        self._fetches: set[Fetch] = set()
        self._closed = False
        self._relays_from = -math.inf
        """Time of the loop from which on versions may come from copies on other hosts."""
        self.statistics = NetworkStatistics()

    def find(self, handle: StateHandle) -> ShmSource | None:
        """The copy on this host of a state of another one, if there is one."""
        source = handle.source("tcp")
        if not isinstance(source, TcpSource) or source.node == self._place.node:
            return None
        return self._copies.find(handle)

    async def copy_here(self, request: ReadRequest[TcpSource], open_door: Callable[[], BulkServer]) -> Copy:
        """The copy on this host. It is fetched first, unless it is there or another process fetches it.
        ``open_door``: for other hosts that read it from here, meanwhile and later."""
        while True:
            if self._closed:
                raise TransportClosed
            # Locks of a file, not messages between the processes: they need not know each other, and the kernel ends
            # the lock of one that is killed. The lock comes first: with it, what is not there will not appear.
            lock = self._copies.try_lock(request.handle.key)
            try:
                if (source := self._copies.find(request.handle)) is not None:
                    return Copy(source, is_verified=False)
                if lock is not None:
                    begin = functools.partial(self._copies.begin, request.handle, self._workers.share)
                    block, generation = await self.fetch(request, begin, open_door)
                    return Copy(self._copies.source(block, generation), is_verified=True)
            finally:
                if lock is not None:
                    os.close(lock)
            request.progress.words = "another process of this host fetches it"
            await self._wait_unlocked(request.handle.key)

    async def _wait_unlocked(self, key: str) -> None:
        """Returns when no other process of this host fetches a version of ``key``. Raises TransportClosed."""
        while self._copies.is_locked(key):
            await asyncio.sleep(_POLL_S)
            if self._closed:
                raise TransportClosed

    async def fetch(
        self,
        request: ReadRequest[TcpSource],
        begin: Callable[[], tuple[Block, Block | None]],
        open_door: Callable[[], BulkServer] | None = None,
    ) -> tuple[Block, int]:
        """Fills the block that ``begin`` has begun, and publishes it; returns its generation too. The other block of
        ``begin`` is a version to which changes can be applied. ``open_door``: see ``copy_here``; None: no other host
        reads it."""
        handle = request.handle
        fetch = Fetch(self.bulk, request.source, handle, request.progress, self.statistics)
        arriving = self._arriving_at(open_door) if fetch.is_relayed else None

        def work(stop: threading.Event) -> tuple[Block, int]:
            block, base = begin()
            return block, fetch.run(block, base, self._workers.share, arriving)

        self._fetches.add(fetch)
        # Never in the event loop, however small the state is, as it waits for the network: so the size is one that a
        # thread takes.
        moving = asyncio.ensure_future(self._workers.run(handle.size_bytes + INLINE_BYTES + 1, work))
        try:
            while not (await asyncio.wait([moving], timeout=RELAY_S))[0]:
                fetch.watch_relay()
            return moving.result()
        except asyncio.CancelledError:
            fetch.abort()
            await wait_ended(moving)
            if not moving.cancelled():
                moving.exception()  # known: it was aborted
            raise
        finally:
            self._fetches.discard(fetch)
            if fetch.relay_failure is not None:
                # Hosts that can't reach each other are found out once in a while, and not with each version.
                self._relays_from = asyncio.get_running_loop().time() + _NO_RELAYS_S
                log.warning(
                    "a copy on another host was given up, and the state came from its owner",
                    key=handle.key, version=handle.version, copy=fetch.relay_failure,
                    no_copies_for_s=_NO_RELAYS_S,
                )  # fmt: skip

    def _arriving_at(
        self, open_door: Callable[[], BulkServer] | None
    ) -> Callable[[Arrival], AbstractContextManager[Relay]] | None:
        """Has other hosts read what arrives here; None if they don't."""
        if open_door is None or asyncio.get_running_loop().time() < self._relays_from:
            return None
        try:
            return open_door().arriving
        except OSError as error:
            log.warning("this process can't pass states on to other hosts", reason=text_of(error))
            return None

    def drop(self, key: str) -> None:
        """Removes the copies of ``key`` on this host."""
        self._copies.drop(key)

    async def close(self) -> None:
        """To be called before the memory is removed."""
        self._closed = True
        for fetch in self._fetches:
            fetch.abort()
        await self._workers.close()
        self._copies.close()


class NodeCopies:
    """The copies of other hosts' states on this host: fetched by one process, read by all through shared memory.

    There is a lock per key, held by the process that fetches: the others wait for it, and then find the copy. A key has
    two blocks as a rule. The newest version stays while the next one is written to another block, so that a fetch that
    fails, or is killed, leaves it whole. A block goes with the process that made it.

    They lie in ``directory``, the run's directory on tmpfs of this host.
    """

    def __init__(self, directory: Path, place: Place) -> None:
        self._directory = directory
        self._place = place
        self._by_name: dict[str, Block] = {}
        self._new_blocks: dict[str, Block] = {}
        self._numbers = itertools.count()
        self._watching: int | None = None
        self._populated: set[str] = set()

    def find(self, handle: StateHandle) -> ShmSource | None:
        """The source of the copy of that version on this host, if there is one."""
        for block in self._whole(handle.key):
            if (
                block.version == handle.version
                and block.size_bytes == handle.size_bytes
                and table_digest(block.table, handle.size_bytes) == handle.digest
            ):
                return self.source(block, block.generation)
        return None

    def source(self, block: Block, generation: int) -> ShmSource:
        """The source of the version that a block of this host has with ``generation``."""
        return ShmSource("shm", self._place.node, self._place.process, block.name, generation)

    def try_lock(self, key: str) -> int | None:
        """A descriptor that has the lock of ``key`` until it is closed; None if another one has it."""
        descriptor = self._opened_lock_file()
        if try_lock(descriptor, _lock_of(key), exclusive=True):
            return descriptor
        os.close(descriptor)
        return None

    def is_locked(self, key: str) -> bool:
        """True if another one has the lock of ``key``. One system call: cheap enough to be asked often by those that
        wait, while the cores are busy with what they wait for."""
        if self._watching is None:
            self._watching = self._opened_lock_file()
        return is_locked(self._watching, _lock_of(key))

    def _opened_lock_file(self) -> int:
        path = self._directory / LOCK_FILE
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def begin(self, handle: StateHandle, share: Share) -> tuple[Block, Block | None]:
        """A block for the version, which is marked as being written, and the newest version that changes can be applied
        to, if there is one. To be called with the lock of the key. Raises ArenaSpace."""
        # Of the newest version that is whole, also if another process has fetched it: the fewer the changes since.
        newest = max(self._whole(handle.key), key=lambda block: block.version, default=None)
        base = newest if newest is not None and newest.size_bytes == handle.size_bytes else None
        for block in self._blocks(handle.key):
            if block is newest or block.in_use:
                continue
            if handle.size_bytes <= block.capacity and block.begin(handle.version, handle.size_bytes):
                self._populate(block, share)
                return block, base
            block.unlink()
        return self._new(handle, share), base

    def _new(self, handle: StateHandle, share: Share) -> Block:
        name = f"copy-{_number(handle.key):016x}-{self._place.process}-{next(self._numbers)}.arena"
        block = Block.create(self._directory, name, handle.size_bytes)
        self._new_blocks[name] = self._by_name[name] = block
        block.begin(handle.version, handle.size_bytes)
        self._populate(block, share)
        return block

    def _populate(self, block: Block, share: Share) -> None:
        """Gives the pages to this process, once for each block: also one that another process has made and filled. Each
        page that is first touched while bytes arrive would cost much more."""
        if block.name in self._populated:
            return
        try:
            populate(block, share)
        except BaseException:
            block.end()
            raise
        self._populated.add(block.name)

    def drop(self, key: str) -> None:
        """Removes the copies of ``key``."""
        for block in self._blocks(key):
            block.unlink()

    def close(self) -> None:
        """Removes the copies that this process has made."""
        for block in self._new_blocks.values():
            block.unlink()
            block.close()
        self._new_blocks.clear()
        self._by_name.clear()
        if self._watching is not None:
            os.close(self._watching)
            self._watching = None

    def _whole(self, key: str) -> list[Block]:
        return [block for block in self._blocks(key) if block.generation and block.generation % 2 == 0]

    def _blocks(self, key: str) -> list[Block]:
        """Those that exist, of any process."""
        # The directory is the list of the copies: a list of its own would have to be repaired after each kill -9.
        names = {path.name for path in self._directory.glob(f"copy-{_number(key):016x}-*.arena")}
        for name in [name for name, block in list(self._by_name.items()) if not block.is_linked]:
            self._by_name.pop(name, None)
            self._populated.discard(name)
        for name in names - self._by_name.keys():
            try:
                self._by_name[name] = Block.open(self._directory, name, writable=True)
            except (FileNotFoundError, ForeignHandle):  # removed, or made, at this moment
                continue
        return [self._by_name[name] for name in sorted(names & self._by_name.keys())]


def _lock_of(key: str) -> int:
    # A position in a file has 63 bits. Two keys with one position wait for each other, and no more.
    return _number(key) >> 2


def _number(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode())
