"""Relays: hosts that have received a version, or are receiving it, pass it on, so that its owner sends it once.

    owner ──chunks──> first reader ──chunks──> second ──chunks──> third ...

A chain, not a tree: each host's port carries the version once in each direction, however many hosts read it, and the
last host has it some chunks after the first. With two readers each, every port would carry it twice.

A reader is sent to another one by the owner, which knows the readers and their order, and nothing of their progress.
So there are no cycles: each reads from one that has come before it. A reader that gets nothing from another one, or
wrong bytes, reads from the owner instead.
"""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from ..host_memory.block import Block

R = TypeVar("R")

_WAIT_S: Final = 5.0
"""Seconds that a reader's connection waits here for a chunk. Longer than the reader waits: it decides."""


@dataclass(frozen=True, slots=True)
class Relay:
    """A copy on another host, served at ``address`` (host and port): ``block``, which has ``generation`` once all bytes
    are there."""

    address: str
    block: str
    generation: int


class Chain(Generic[R]):
    """The readers of one version in the order in which each passes it on to the next. Pure."""

    def __init__(self) -> None:
        self._readers: list[R] = []

    def join(self, reader: R) -> R | None:
        """The reader from which ``reader`` gets the version; None: from its owner. The next one that joins gets it from
        ``reader``."""
        if reader in self._readers:
            # It begins again, and those behind it may wait for it: it must not wait for one of them.
            return None
        before = self._readers[-1] if self._readers else None
        self._readers.append(reader)
        return before

    def leave(self, reader: R) -> None:
        """Takes ``reader`` out of the chain, so that no other reader is sent to it. Does nothing if it is not there."""
        if reader in self._readers:
            self._readers.remove(reader)


class Arrival:
    """A version on its way into a block of this process, read by other hosts meanwhile. ``block``: it was begun.
    ``generation``: the one that it will have. All methods may be called by several threads."""

    def __init__(self, block: "Block") -> None:
        self.block = block
        self.generation = block.generation + 1
        self._condition = threading.Condition()
        self._has_table = False
        self._chunks: set[int] = set()
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """True if no more bytes come: the block has the version then, or nothing."""
        return self._has_ended

    def table_came(self) -> None:
        """The digests of all chunks are in the block."""
        with self._condition:
            self._has_table = True
            self._condition.notify_all()

    def chunk_came(self, number: int) -> None:
        """A chunk is in the block, and has the right digest."""
        with self._condition:
            self._chunks.add(number)
            self._condition.notify_all()

    def end(self) -> None:
        """No more bytes come."""
        with self._condition:
            self._has_ended = True
            self._condition.notify_all()

    def wait_table(self) -> bool:
        """False if the digests of the chunks have not come in time."""
        with self._condition:
            self._condition.wait_for(lambda: self._has_table or self._has_ended, _WAIT_S)
            return self._has_table

    def wait(self, number: int) -> bool:
        """False if a chunk has not come in time."""
        with self._condition:
            self._condition.wait_for(lambda: self._has_ended or number in self._chunks, _WAIT_S)
            return number in self._chunks


class RelayUse:
    """The relay that one fetch reads from, until it is given up: ``failure`` has the reason then. All methods may be
    called by several threads."""

    def __init__(self) -> None:
        self.relay: Relay | None = None
        self.failure: str | None = None
        self._unreported: Relay | None = None
        self._watched_bytes = 0
        self._lock = threading.Lock()

    def give_up(self, relay: Relay, reason: str) -> bool:
        """The owner is read from now on. False if it was so before."""
        with self._lock:
            if self.relay is not relay:
                return False
            self.relay, self._unreported = None, relay
            self.failure = f"{relay.address}: {reason}"
            return True

    def late(self, got_bytes: int, least_bytes: int) -> Relay | None:
        """The relay, if fewer than ``least_bytes`` have come since the last call. ``got_bytes``: so far."""
        with self._lock:
            brought, self._watched_bytes = got_bytes - self._watched_bytes, got_bytes
            return self.relay if brought < least_bytes else None

    def take_unreported(self) -> Relay | None:
        """A relay that was given up, and of which the owner has not heard yet."""
        with self._lock:
            relay, self._unreported = self._unreported, None
            return relay
