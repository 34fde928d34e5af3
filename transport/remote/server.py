"""Serves the memory of a process to readers on other hosts, by threads: blocks of states, and bytes by name.

Each connection has a thread. Encryption and digests are computed without the GIL, and a blocking ``sendall`` reads the
shared memory in place. Python's ``ssl`` under asyncio would copy every byte twice more, on the event loop.

While a version is open for a reader, its block is locked: its owner sets the next versions in other blocks. A reader
that asks for nothing within ``IDLE_S`` loses its lock. A version that is on its way to this host itself is served range
by range, as these arrive (``relays.py``).
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import xxhash

from ...core.telemetry import BoundedLog, get_logger
from ...core.wire.zeromq import bracket_ipv6
from ..errors import ForeignHandle, StaleHandle
from ..handle import ShmSource, TcpSource
from ..host_memory.block import CHUNK_BYTES, Block
from ..payload import table_digest
from ..statistics import NetworkStatistics
from .bulk import Bulk, Refused, secure
from .deltas import Deltas
from .frames import Answer, BadFrame, Join, Leave, NamedRange, Open, Read, Reply, Requests, encode_relay
from .relays import Arrival, Chain, Relay

# Why not the actors' connections: a message is in memory as a whole, passes the event loop and is paid for by credit,
# and a Get of gigabytes would delay the calls beside it. Over one connection of the loopback, ZeroMQ with CURVE moves
# 0.3 to 0.7 GB/s, TLS on a socket 0.65, and a plain socket into prepared memory 1.6.

log = get_logger(__name__)

# An open version keeps its block from being written: the owner takes more memory for the next ones meanwhile, and a
# frozen reader would keep it for ever.
IDLE_S: Final = 60.0
_HANDSHAKE_S: Final = 5.0
# Each has a thread: many more could be asked for by a stranger, who gets one before the handshake.
_MOST_CONNECTIONS: Final = 256

Blocks = Callable[[str], tuple[Block, list[Block]]]
"""The block of a name, and the others with versions of its key. Raises StaleHandle, ForeignHandle."""


NamedBytes = Callable[[NamedRange], memoryview]
"""The bytes of a range of a name. Raises ForeignHandle. Called by several threads."""


def no_blocks(name: str) -> tuple[Block, list[Block]]:
    """``Blocks`` of a process without states."""
    raise ForeignHandle(name, "this process", "it has no states")


def no_named_bytes(request: NamedRange) -> memoryview:
    """``NamedBytes`` of a process that serves states alone."""
    raise ForeignHandle(request.name, "this process", "it serves no bytes by name")


class BulkServer:
    """Listens until ``close``. ``address``: for readers. Raises OSError if it can't listen.

    ``blocks``: the states that it serves. ``named_bytes``: a source of other bytes, whose names mean something to the
    two ends alone; each range goes out with its digest.
    """

    def __init__(
        self,
        bulk: Bulk,
        statistics: NetworkStatistics,
        blocks: Blocks = no_blocks,
        named_bytes: NamedBytes = no_named_bytes,
    ) -> None:
        self._bulk = bulk
        self.encrypted = bulk.encrypted
        self._blocks = blocks
        self.named_bytes = named_bytes
        self.statistics = statistics
        family = socket.AF_INET6 if ":" in bulk.host else socket.AF_INET
        # Bound here, not in the thread: an address that is taken is the caller's error.
        self._listener = socket.create_server((bulk.host, bulk.port), family=family, backlog=128)
        host, port = bulk.advertise or bulk.host, self._listener.getsockname()[1]
        self.address = f"{bracket_ipv6(host)}:{port}"
        self._lock = threading.Lock()
        self._sessions: dict[threading.Thread, socket.socket] = {}
        self._deltas: dict[str, Deltas] = {}
        self._read: dict[str, int] = {}
        self._chains: dict[str, tuple[int, Chain[Relay]]] = {}
        """Readers of the newest generation of each block that was asked for."""
        self._arrivals: dict[str, Arrival] = {}
        self._refusals = BoundedLog(log, lines=1)
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="flexmarl-bulk", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Ends all connections and returns when no thread of the server reads memory any more. Blocks."""
        self._closed = True
        # Shut down before they are closed, the listener and the connections: a close does not wake a thread that waits
        # in a call on the descriptor, and frees its number for another file.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        with self._lock:
            sessions = dict(self._sessions)
            arrivals = [*self._arrivals.values()]
        for arrival in arrivals:  # sessions may wait for them
            arrival.end()
        for connection in sessions.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in sessions:
            thread.join()
        self._refusals.close()

    # ----------------------------------------------------------------------- connections

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                if not self._closed:
                    # No descriptor is free. The connection stays in the queue, so the next accept fails as fast.
                    time.sleep(0.1)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection, peer[0]), name="flexmarl-bulk-serve", daemon=True
            )
            with self._lock:
                full = len(self._sessions) >= _MOST_CONNECTIONS
                if not full:
                    self._sessions[thread] = connection
            if full:
                connection.close()
            else:
                thread.start()

    def _serve(self, raw: socket.socket, peer: str) -> None:
        connection = raw
        try:
            raw.settimeout(_HANDSHAKE_S)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = secure(raw, self._bulk, server=True)
            connection.settimeout(IDLE_S)
            with self._lock:
                self._sessions[threading.current_thread()] = connection
            # Asked after the socket is in the list: ``close`` either finds it there, or has set this before.
            if not self._closed:
                with _Session(self, connection) as session:
                    session.run()
        except (Refused, BadFrame) as error:
            self._report_refused(peer, str(error))
        except OSError:
            pass  # the reader has ended, or connects again
        finally:
            connection.close()
            with self._lock:
                self._sessions.pop(threading.current_thread(), None)

    def _report_refused(self, peer: str, reason: str) -> None:
        """Each address is logged once within a while."""
        with self._lock:
            self.statistics.refused += 1
            self._refusals.warning(
                "a reader of states was refused",
                key=peer, peer=peer, reason=reason, refused=self.statistics.refused,
            )  # fmt: skip

    # ----------------------------------------------------------------------- versions

    def source(self, memory: ShmSource) -> TcpSource:
        """A block of this process, for readers of other hosts."""
        return memory.served_at(self.address, encrypted=self.encrypted)

    def open_version(self, request: Open) -> tuple[Block, int, Deltas | None]:
        """The block of a version, which stays as it is until the descriptor is closed, and its changes from the version
        that the reader has, if that is here. Raises StaleHandle, ForeignHandle."""
        block, other_blocks = self._blocks(request.block)
        if request.size_bytes > block.capacity:
            raise ForeignHandle(block.name, str(block.directory), f"it has {block.capacity} bytes")
        # Held first, then compared: after the comparison alone the owner could begin to write.
        held = block.hold()
        if held is None or block.generation != request.generation:
            if held is not None:
                os.close(held)
            raise StaleHandle(request.block, 0, block.version)
        # Remembered, so that the next Set computes changes only if a reader is there that can apply them.
        self._read[block.name] = request.generation
        for other in other_blocks:
            deltas = Deltas(other, block, request.size_bytes)
            if _has_base(other, request) and deltas.has_old:
                return block, held, self._reuse(deltas)
        return block, held, None

    # ----------------------------------------------------------------------- relays

    @contextmanager
    def arriving(self, arrival: Arrival) -> Iterator[Relay]:
        """Serves a version while it arrives; the result names it for other readers. At the end its block is published,
        or will not be."""
        name = arrival.block.name
        with self._lock:
            self._arrivals[name] = arrival
        try:
            yield Relay(self.address, name, arrival.generation)
        finally:
            with self._lock:
                del self._arrivals[name]
            arrival.end()

    def arrival(self, request: Open) -> Arrival | None:
        """The version that arrives here, if it is the one that ``request`` names."""
        with self._lock:
            arrival = self._arrivals.get(request.block)
        if arrival is None or arrival.generation != request.generation:
            return None
        return arrival if request.size_bytes == arrival.block.size_bytes else None

    def join(self, request: Join) -> Relay | None:
        """The copy that the reader shall read from; None: the version here."""
        version = request.version
        try:
            _, held, deltas = self.open_version(version)
        except (StaleHandle, ForeignHandle):
            return None  # the Open that follows reports it
        os.close(held)
        with self._lock:
            generation, chain = self._chains.get(version.block, (0, Chain[Relay]()))
            if generation != version.generation:
                chain = Chain()
                self._chains[version.block] = version.generation, chain
            before = chain.join(request.copy)
        # Few changes are less than the whole version, which all others have: they come from here.
        return None if deltas is not None and deltas.are_small() else before

    def leave(self, request: Leave) -> None:
        """Takes the copy of ``request`` out of the chain of its version, so that no reader is sent to it."""
        version = request.version
        with self._lock:
            generation, chain = self._chains.get(version.block, (0, Chain[Relay]()))
            if generation == version.generation:
                chain.leave(request.copy)

    def count(self, *, whole_bytes: int = 0, delta_bytes: int = 0) -> None:
        """Adds bytes that are about to be sent to the statistics: bytes of states or names as they are, and bytes of
        deltas."""
        # Before they are sent, so that a reader that has the bytes finds them counted. A connection that ends may leave
        # some of them counted twice.
        with self._lock:
            self.statistics.sent_bytes += whole_bytes + delta_bytes
            self.statistics.sent_delta_bytes += delta_bytes

    def _reuse(self, deltas: Deltas) -> Deltas:
        """Those of the same two versions that were computed before, if there are some."""
        with self._lock:
            current = self._deltas.get(deltas.pair.new)
            if current is not None and current.pair == deltas.pair:
                return current
            # A block that was freed since the caller has found it is forgotten already: its memory would stay.
            if deltas.has_both:
                self._deltas.pop(deltas.pair.old, None)  # the changes that led to the old version
                self._deltas[deltas.pair.new] = deltas
            return deltas

    def forget(self, name: str) -> None:
        """Keeps nothing of a block that was revoked: changes from it and to it keep its memory mapped, also when its
        file is gone."""
        with self._lock:
            self._read.pop(name, None)
            self._chains.pop(name, None)
            for new, deltas in list(self._deltas.items()):
                if name in (deltas.pair.old, deltas.pair.new):
                    del self._deltas[new]

    def compare(self, old: Block, new: Block, size_bytes: int) -> Callable[[int], None] | None:
        """To be called with the first byte of each chunk of ``new`` as soon as it is written, by a Set that keeps
        ``old`` meanwhile. None if no reader has fetched ``old``: else it will want the changes."""
        if old.size_bytes != size_bytes or self._read.get(old.name) != old.generation:
            return None
        deltas = Deltas(old, new, size_bytes)  # not those of a Set that has failed
        with self._lock:
            self._deltas.pop(old.name, None)  # the changes that led to the old version
            self._deltas[new.name] = deltas
        return deltas.compute


def _has_base(other: Block, request: Open) -> bool:
    """True if the block has the version that the reader has."""
    return other.size_bytes == request.size_bytes and (
        table_digest(other.table, request.size_bytes) == request.base
    )


class _Session:
    """One connection of a reader."""

    def __init__(self, server: BulkServer, connection: socket.socket) -> None:
        self._server = server
        self._connection = connection
        self._held: int | None = None
        self._block: Block | None = None
        self._size_bytes = 0
        self._deltas: Deltas | None = None
        self._arrival: Arrival | None = None

    def __enter__(self) -> "_Session":
        return self

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            os.close(self._held)

    def run(self) -> None:
        """Replies until the reader ends the connection. Raises OSError, BadFrame."""
        requests = Requests()
        while received := self._connection.recv(4096):
            for request in requests.feed(received):
                match request:
                    case Open():
                        self._open(request)
                    case Read():
                        self._send(request)
                    case NamedRange():
                        self._send_named(request)
                    case Join():
                        relay = self._server.join(request)
                        answer = b"" if relay is None else encode_relay(relay)
                        self._connection.sendall(Reply(Answer.JOINED, len(answer)).encode() + answer)
                    case Leave():
                        self._server.leave(request)

    def _open(self, request: Open) -> None:
        if self._block is not None:
            raise BadFrame("a version is open already")
        try:
            arrival = self._server.arrival(request)
            if arrival is not None and arrival.wait_table():
                block, self._arrival = arrival.block, arrival
            else:
                block, self._held, self._deltas = self._server.open_version(request)
        except StaleHandle as stale:
            number = 0 if stale.newest is None else stale.newest + 1
            self._connection.sendall(Reply(Answer.STALE, 0, number).encode())
            return
        except ForeignHandle:
            self._connection.sendall(Reply(Answer.FOREIGN, 0).encode())
            return
        self._block, self._size_bytes = block, request.size_bytes
        # All digests at once, before the first range: the reader compares them with the handle's digest, and from then
        # on each chunk as it arrives.
        table = block.table[: -(-request.size_bytes // CHUNK_BYTES)].tobytes()
        reply = Reply(Answer.OPENED, len(table), has_base=self._deltas is not None)
        self._connection.sendall(reply.encode() + table)

    def _send_named(self, request: NamedRange) -> None:
        try:
            memory = self._server.named_bytes(request)
        except ForeignHandle:
            self._connection.sendall(Reply(Answer.FOREIGN, 0).encode())
            return
        digest = xxhash.xxh3_64_intdigest(memory)
        self._server.count(whole_bytes=len(memory))
        self._connection.sendall(Reply(Answer.NAMED, len(memory), digest).encode())
        self._connection.sendall(memory)

    def _send(self, request: Read) -> None:
        if self._block is None or request.end > self._size_bytes:
            raise BadFrame(f"bytes {request.start} to {request.end} of {self._size_bytes}")
        if self._arrival is not None:
            self._pass_on(self._arrival, request)
            return
        changes = None
        if request.delta and self._deltas is not None:
            changes = self._deltas.of(request.start, request.end)
        if changes is not None and len(changes) < request.end - request.start:
            self._server.count(delta_bytes=len(changes))
            self._connection.sendall(Reply(Answer.DELTA, len(changes)).encode())
            self._connection.sendall(changes)
            return
        self._server.count(whole_bytes=request.end - request.start)
        self._connection.sendall(Reply(Answer.RAW, request.end - request.start).encode())
        # In place, from the mapping. Not sendfile(2): TLS is computed in this process, so that it would serve trusted
        # networks alone.
        self._connection.sendall(self._block.payload[request.start : request.end])

    def _pass_on(self, arrival: Arrival, request: Read) -> None:
        """Sends a range chunk by chunk, as these arrive here. Raises ConnectionAbortedError if one does not come in
        time, or if the block has other bytes by now: the reader turns to the owner."""
        self._connection.sendall(Reply(Answer.RAW, request.end - request.start).encode())
        for start in range(request.start, request.end, CHUNK_BYTES):
            if not arrival.wait(start // CHUNK_BYTES):
                raise ConnectionAbortedError(f"byte {start} has not arrived here")
            if arrival.has_ended and self._held is None:
                # While the version arrived, its writer had the lock. A block that is written again before it could be
                # held here has other bytes: the reader's digests would show them too.
                self._held = arrival.block.hold()
                if self._held is None or arrival.block.generation != arrival.generation:
                    raise ConnectionAbortedError("the version is not here any more")
            end = min(start + CHUNK_BYTES, request.end)
            self._server.count(whole_bytes=end - start)
            self._connection.sendall(arrival.block.payload[start:end])
