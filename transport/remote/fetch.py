"""Fetches one version from another host into a block of shared memory, over several connections.

Ranges are taken from one list by all connections. A connection that ends is made again; its ranges go back to the
list, and those that have arrived stay. Every chunk is compared with its digest while it is in the cache, and the table
of the digests with the handle's. With a ``base``, an older version on this host, the owner may send changes instead.

A version of many ranges may come from another reader's copy (``relays.py``): the owner names it. A copy that ends, has
other bytes or brings too little is given up, and the missing ranges come from the owner.
"""

import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from typing import Final

import xxhash

from ...core.base.texts import text_of
from ..errors import (
    CorruptState,
    FetchFailed,
    ForeignHandle,
    PeerRefused,
    StaleHandle,
    TransportClosed,
    TransportError,
)
from ..handle import StateHandle, TcpSource
from ..host_memory.block import CHUNK_BYTES, Block, Share
from ..payload import table_digest
from ..statistics import NetworkStatistics
from ..transfers import Progress
from . import deltas
from .bulk import Bulk, Refused, exactly, receive_into, refusal, secure
from .frames import REPLY_BYTES, Answer, BadFrame, Join, Leave, Open, Read, Reply, decode_relay
from .relays import Arrival, Relay, RelayUse

# A range is lost as a whole with its connection: small enough to be cheap to repeat, large enough that its request and
# reply cost nothing beside it.
RANGE_BYTES: Final = 8 << 20
# One connection encrypts on one core, at 0.65 GB/s.
_CONNECTIONS: Final = 4
# So that the owner always has a request while the last reply is under way.
_REQUESTS_AHEAD: Final = 2
_CONNECT_S: Final = 1.0
# A connection without a byte for this long is given up, and made again. Not TCP's own keepalive: after a cut on the way
# no byte comes from the other side, and TCP takes hours to notice.
_SILENCE_S: Final = 3.0
# Fewer ranges come sooner than a relay is found, and the chunks that are under way to each would be most of them.
_RELAYED_RANGES: Final = 8
# A relay that brings less in this time than a link of 100 Mbit/s could is given up: the owner may be faster.
RELAY_S: Final = 3.0
_LEAST_RELAYED_BYTES: Final = 32 << 20
_PAUSE_S: Final = 0.05
_MOST_PAUSE_S: Final = 0.5


class Fetch:
    """One version of a state, from ``source``. ``progress`` is kept up to date.

    One class of more than 300 lines: connections to the owner and to a relay take ranges from one list, and each may
    give its own back to the other.
    """

    def __init__(
        self,
        bulk: Bulk,
        source: TcpSource,
        handle: StateHandle,
        progress: Progress,
        statistics: NetworkStatistics,
    ) -> None:
        self._bulk = bulk
        self._source = source
        self._handle = handle
        self._progress = progress
        self._statistics = statistics
        self._size_bytes = handle.size_bytes
        ranges = -(-self._size_bytes // RANGE_BYTES)
        self._todo = deque(range(max(1, ranges)))
        self._missing = set(self._todo)
        self._wrong: Counter[int] = Counter()
        self._got_bytes = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: TransportError | None = None
        self._connections: set[socket.socket] = set()
        self._arrival: Arrival | None = None
        self._use = RelayUse()

    @property
    def relay_failure(self) -> str | None:
        """The reason why a relay was given up; None if none was."""
        return self._use.failure

    @property
    def is_relayed(self) -> bool:
        """True if the version is large enough to come from a relay, and to be passed on."""
        return len(self._missing) >= _RELAYED_RANGES

    def run(
        self,
        target: Block,
        base: Block | None,
        share: Share,
        arriving: Callable[[Arrival], AbstractContextManager[Relay]] | None = None,
    ) -> int:
        """Fills ``target``, a block that was begun, and publishes it; returns its generation. ``base``: an older
        version. ``arriving``: has other hosts read the version meanwhile; None: it comes from the owner alone.

        Raises FetchFailed, PeerRefused, StaleHandle, ForeignHandle, CorruptState; TransportClosed after ``abort``. The
        block has ended then.
        """
        self._target = target
        self._base = base
        try:
            with ExitStack() as stack:
                if arriving is not None and self.is_relayed:
                    self._arrival = Arrival(target)
                    self._use.relay = self._find_relay(stack.enter_context(arriving(self._arrival)))
                self._receive_from_all(share)
                # Within the context: a reader finds the version arriving, or whole.
                return target.commit()
        except BaseException:
            target.end()
            raise

    def _receive_from_all(self, share: Share) -> None:
        self._report("")

        def run_connections(numbers: Iterator[int]) -> None:
            for _ in numbers:
                with self._ends_all():
                    self._connection()

        try:
            share(min(_CONNECTIONS, len(self._todo)), run_connections)
        except TransportError as error:
            raise (self._error or error) from None  # the first one, not those that it has led to

    @contextmanager
    def _ends_all(self) -> Iterator[None]:
        """An error of one connection ends all."""
        with ExitStack() as stack:
            stack.callback(self.abort)
            try:
                yield
            except TransportError as error:
                with self._lock:
                    self._error = self._error or error
                raise
            stack.pop_all()

    def abort(self) -> None:
        """Makes ``run`` raise soon. May be called by any thread."""
        self._ended.set()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _connection(self) -> None:
        """One connection, made again as often as it ends, until no range is left to ask for."""
        pause = _PAUSE_S
        while self._todo:
            if self._ended.is_set():
                raise TransportClosed
            if (relay := self._use.relay) is not None:
                self._receive_relayed(relay)
                continue
            requests: deque[int] = deque()
            before = self._got_bytes
            try:
                with self._connect(self._source.address) as connection:
                    self._receive_all(connection, requests, self._source)
            except Refused as refused:
                raise self._error_of(f"refused: {refused}", PeerRefused) from None
            except (BadFrame, deltas.BadDelta) as broken:
                raise self._error_of(str(broken)) from broken
            # No second try: nothing listens there any more, and an owner that is started again has another port as a
            # rule.
            except ConnectionRefusedError:
                raise self._error_of("connection refused: its owner has left") from None
            except socket.gaierror as error:
                raise self._error_of(str(error)) from error
            except OSError as error:
                if (refused_late := refusal(error)) is not None:
                    raise self._error_of(f"refused: {refused_late}", PeerRefused) from None
                if self._ended.is_set():
                    raise TransportClosed from None
                self._report(str(error))
                with self._lock:
                    self._statistics.reconnects += 1
                # A link that brings something is asked again soon, one that brings nothing ever more seldom.
                pause = _PAUSE_S if self._got_bytes > before else min(2 * pause, _MOST_PAUSE_S)
                # To the front: an error names the first range that is missing.
                self._todo.extendleft(reversed(requests))
                self._ended.wait(pause)

    # ----------------------------------------------------------------------- a relay

    def _find_relay(self, copy: Relay) -> Relay | None:
        """The copy to read from; None: from the owner. ``copy``: of this process, for the next reader."""
        try:
            with self._connect(self._source.address) as connection:
                connection.sendall(Join(self._request(), copy).encode())
                reply = Reply.decode(exactly(connection, REPLY_BYTES)).check_joined()
                return decode_relay(exactly(connection, reply.size_bytes))[0] if reply.size_bytes else None
        except (OSError, Refused, BadFrame):
            return None  # the connection for the first range follows at once, and its error has the reason

    def _receive_relayed(self, relay: Relay) -> None:
        """Receives ranges from a relay until none is left, or the relay is given up."""
        requests: deque[int] = deque()
        try:
            with self._connect(relay.address) as connection:
                self._receive_all(connection, requests, relay)
        except (TransportError, Refused, BadFrame, OSError) as error:
            self._todo.extendleft(reversed(requests))
            if self._ended.is_set():
                raise TransportClosed from None
            self._give_up(relay, text_of(error))

    def watch_relay(self) -> None:
        """Gives a relay up that has brought too little since the last call. To be called every ``RELAY_S``."""
        least_bytes = min(_LEAST_RELAYED_BYTES, self._size_bytes // 2)
        if (relay := self._use.late(self._got_bytes, least_bytes)) is not None:
            with self._lock:
                connections = [*self._connections]
            self._give_up(relay, f"less than {least_bytes} bytes in {RELAY_S:g} s")
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _give_up(self, relay: Relay, reason: str) -> None:
        if self._use.give_up(relay, reason):
            with self._lock:
                self._statistics.relays_left += 1

    # ----------------------------------------------------------------------- connections

    @contextmanager
    def _connect(self, address: str) -> Iterator[socket.socket]:
        with (
            closing(connect(address)) as raw,
            self._register(raw),
            closing(secure(raw, self._bulk, server=False)) as connection,
            self._register(connection),
        ):
            yield connection

    @contextmanager
    def _register(self, connection: socket.socket) -> Iterator[None]:
        """``abort`` ends it."""
        with self._lock:
            self._connections.add(connection)
        try:
            # Asked after it is in the set: ``abort`` either finds it there, or has set this before.
            if self._ended.is_set():
                raise TransportClosed
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)

    # ----------------------------------------------------------------------- a connection

    def _receive_all(
        self, connection: socket.socket, requests: "deque[int]", source: TcpSource | Relay
    ) -> None:
        """Asks for ranges and receives them until there are no more. ``requests``: those that have not arrived."""
        has_base = self._open(connection, source)
        while True:
            while len(requests) < _REQUESTS_AHEAD and (number := self._next()) is not None:
                requests.append(number)
                start, end = self._bounds(number)
                if start < end:
                    wants_delta = has_base and not self._wrong[number]
                    connection.sendall(Read(start, end, wants_delta).encode())
            if not requests:
                return
            number = requests[0]
            start, end = self._bounds(number)
            is_right = start == end or self._receive(connection, start, end)
            if not is_right and source is not self._source:
                raise BadFrame(f"bytes {start} to {end} are not those of the version")
            requests.popleft()
            self._end_range(number, end - start, is_right)

    def _request(self) -> Open:
        """The version as its owner knows it."""
        base = None if self._base is None else table_digest(self._base.table, self._size_bytes)
        return Open(self._source.block, self._source.generation, self._size_bytes, base)

    def _open(self, connection: socket.socket, source: TcpSource | Relay) -> bool:
        """True if deltas may be asked for."""
        handle, request = self._handle, self._request()
        if source is not self._source:
            request = Open(source.block, source.generation, self._size_bytes)
        elif (copy := self._use.take_unreported()) is not None:
            connection.sendall(Leave(request, copy).encode())
        connection.sendall(request.encode())
        chunks = -(-self._size_bytes // CHUNK_BYTES)
        reply = Reply.decode(exactly(connection, REPLY_BYTES)).check(chunks=chunks)
        if reply.answer is Answer.STALE:
            raise StaleHandle(handle.key, handle.version, reply.number - 1 if reply.number else None)
        if reply.answer is Answer.FOREIGN:
            raise ForeignHandle(source.block, source.address, "its owner does not serve it")
        table = memoryview(exactly(connection, reply.size_bytes)).cast("Q")
        digest = table_digest(table, self._size_bytes)
        if digest != handle.digest:
            raise CorruptState(handle.key, handle.version, handle.digest, digest)
        # By each connection, with the same bytes: they were compared with the handle's digest.
        self._target.table[:chunks] = table
        if self._arrival is not None:
            self._arrival.table_came()
        return reply.has_base

    def _receive(self, connection: socket.socket, start: int, end: int) -> bool:
        """False if a chunk has another digest."""
        reply = Reply.decode(exactly(connection, REPLY_BYTES)).check(range_bytes=end - start)
        if reply.answer is Answer.DELTA:
            changes = exactly(connection, reply.size_bytes)
            self._count(reply.size_bytes, delta_bytes=reply.size_bytes)
            return self._apply(memoryview(changes), start, end)
        is_right = True
        # Chunk by chunk, not as one range: each digest is computed while its bytes are in the cache.
        for first in range(start, end, CHUNK_BYTES):
            last = min(first + CHUNK_BYTES, end)
            receive_into(connection, self._target.payload[first:last])
            self._count(last - first)
            is_right &= self._is_right(first, last)
        return is_right

    def _apply(self, changes: memoryview, start: int, end: int) -> bool:
        assert self._base is not None, "no delta was asked for"
        is_right, read = True, 0
        for first in range(start, end, CHUNK_BYTES):
            last = min(first + CHUNK_BYTES, end)
            padded = -(-last // 8) * 8  # memory ends with a page
            chunk = self._target.payload[first:padded]
            chunk[:] = self._base.payload[first:padded]
            read += deltas.apply(changes[read:], chunk)
            is_right &= self._is_right(first, last)
        if read != len(changes):
            raise deltas.BadDelta(f"{len(changes) - read} bytes too many")
        return is_right

    def _is_right(self, first: int, last: int) -> bool:
        number = first // CHUNK_BYTES
        is_right = xxhash.xxh3_64_intdigest(self._target.payload[first:last]) == self._target.table[number]
        if is_right and self._arrival is not None:
            self._arrival.chunk_came(number)
        return is_right

    # ----------------------------------------------------------------------- ranges

    def _bounds(self, number: int) -> tuple[int, int]:
        return number * RANGE_BYTES, min((number + 1) * RANGE_BYTES, self._size_bytes)

    def _next(self) -> int | None:
        with suppress(IndexError):
            return self._todo.popleft()
        return None

    def _end_range(self, number: int, size_bytes: int, is_right: bool) -> None:
        if not is_right:  # once more, and as a whole: the base may be another version than its table says
            self._wrong[number] += 1
            if self._wrong[number] > 1:
                first = number * RANGE_BYTES // CHUNK_BYTES
                chunk = self._target.payload[number * RANGE_BYTES :][: min(CHUNK_BYTES, size_bytes)]
                digest = xxhash.xxh3_64_intdigest(chunk)
                raise CorruptState(self._handle.key, self._handle.version, self._target.table[first], digest)
            self._todo.append(number)
            return
        with self._lock:
            self._missing.discard(number)
            self._got_bytes += size_bytes
        self._report("")

    def _count(self, size_bytes: int, *, delta_bytes: int = 0) -> None:
        with self._lock:
            self._statistics.got_bytes += size_bytes
            self._statistics.got_delta_bytes += delta_bytes
            if self._use.relay is not None:
                self._statistics.relayed_bytes += size_bytes

    def _report(self, trouble: str) -> None:
        with self._lock:
            first = min(self._missing, default=0)
            relay = self._use.relay
            source = self._source.address if relay is None else f"a copy at {relay.address}"
            done = f"{self._got_bytes} bytes came from {source}, range {first} did not yet"
        self._progress.words = f"{done}: {trouble}" if trouble else done

    def _error_of(self, reason: str, kind: Callable[..., FetchFailed] = FetchFailed) -> FetchFailed:
        handle = self._handle
        with self._lock:
            first = min(self._missing, default=0)
            return kind(
                handle.key, handle.version, self._source.address, first, self._got_bytes, handle.size_bytes, reason
            )  # fmt: skip


def connect(address: str) -> socket.socket:
    """A connection on which a byte may take ``_SILENCE_S``. Raises OSError."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)
    connection.settimeout(_SILENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
