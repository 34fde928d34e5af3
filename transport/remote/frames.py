"""The messages between the reader of bytes and their owner: bytes in, messages out, without I/O.

    reader  Open    names a version: its block, generation and size; the digest of a version that the reader has
    owner   Reply   opened, followed by the digest of every chunk (8 bytes each, little-endian); or stale, foreign
    reader  Read    bytes ``start`` to ``end`` of the version, a range; several may be under way
    owner   Reply   raw, followed by these bytes; or delta, followed by the changes (``deltas.py``)

    reader  NamedRange
                    a range of bytes that the owner serves under a name (``named_ranges.py``); several may be under way
    owner   Reply   named, followed by these bytes; or foreign

    reader  Join    names a version as Open does, and the reader's copy of it, for other readers (``relays.py``)
    owner   Reply   joined, followed by the copy to read from; by nothing: read from here
    reader  Leave   names a copy from which it could not read; without a reply

Replies come in the order of the requests. The version can't change while it is open. A peer that breaks the rules, or
closes, ends the connection. All sizes are checked before memory is allocated.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from ..host_memory.block import CHUNK_BYTES
from .relays import Relay

# Fixed headers, not MessagePack: the reader knows from one of them how many bytes follow, and receives these into
# memory that it has prepared, without a decoder between.
MOST_RANGE_BYTES: Final = 64 << 20
# Requests are names and numbers. Bytes of one that is not complete are kept, so a stranger must not choose how many.
_MOST_FRAME_BYTES: Final = 1024
_MAGIC: Final = b"FXB1"
_PREFIX: Final = struct.Struct("!4sBxH")  # magic, kind, bytes that follow
_OPEN: Final = struct.Struct("!QQ?Q")
_READ: Final = struct.Struct("!QQ?")
_REPLY: Final = struct.Struct("!4sB?xxQQ")
_NAMED: Final = struct.Struct("!QQ")
_RELAY: Final = struct.Struct("!QHH")  # generation, bytes of the address, of the block
_MOST_RELAY_BYTES: Final = 512
_OPEN_KIND, _READ_KIND, _NAMED_KIND, _JOIN_KIND, _LEAVE_KIND = 1, 2, 3, 4, 5
REPLY_BYTES: Final = _REPLY.size


class BadFrame(Exception):
    """The peer has broken the rules of the messages."""


@dataclass(frozen=True, slots=True)
class Open:
    """``base``: the digest of a version of the same key that the reader has; None: it has none."""

    block: str
    generation: int
    size_bytes: int
    base: int | None = None

    def encode(self) -> bytes:
        """The message's bytes."""
        return _frame(_OPEN_KIND, self.body())

    def body(self) -> bytes:
        """The message's bytes without their head."""
        numbers = _OPEN.pack(self.generation, self.size_bytes, self.base is not None, self.base or 0)
        return numbers + self.block.encode()

    @classmethod
    def decode(cls, body: bytes) -> "Open":
        """The reverse of ``body``. Raises struct.error, UnicodeDecodeError."""
        generation, size_bytes, has_base, base = _OPEN.unpack_from(body)
        return cls(body[_OPEN.size :].decode(), generation, size_bytes, base if has_base else None)


@dataclass(frozen=True, slots=True)
class Read:
    """``delta``: the changes since the base may be sent instead of the bytes."""

    start: int
    end: int
    delta: bool = False

    def encode(self) -> bytes:
        """The message's bytes."""
        return _frame(_READ_KIND, _READ.pack(self.start, self.end, self.delta))


@dataclass(frozen=True, slots=True)
class NamedRange:
    """Bytes ``start`` to ``end`` of those that their owner serves as ``name``."""

    name: str
    start: int
    end: int

    def encode(self) -> bytes:
        """The message's bytes."""
        return _frame(_NAMED_KIND, _NAMED.pack(self.start, self.end) + self.name.encode())


@dataclass(frozen=True, slots=True)
class Join:
    """``copy``: of the reader, into which it is about to receive ``version``."""

    version: Open
    copy: Relay

    def encode(self) -> bytes:
        """The message's bytes."""
        return _frame(_JOIN_KIND, encode_relay(self.copy) + self.version.body())


@dataclass(frozen=True, slots=True)
class Leave:
    """``copy``: another reader's, from which ``version`` could not be read."""

    version: Open
    copy: Relay

    def encode(self) -> bytes:
        """The message's bytes."""
        return _frame(_LEAVE_KIND, encode_relay(self.copy) + self.version.body())


Request = Open | Read | NamedRange | Join | Leave


def encode_relay(relay: Relay) -> bytes:
    """A copy on another host, as bytes."""
    address, block = relay.address.encode(), relay.block.encode()
    return _RELAY.pack(relay.generation, len(address), len(block)) + address + block


def decode_relay(received: bytes | bytearray) -> tuple[Relay, bytes]:
    """The reverse of ``encode_relay``, and the bytes behind it. Raises BadFrame."""
    try:
        generation, address_bytes, block_bytes = _RELAY.unpack_from(received)
        middle = _RELAY.size + address_bytes
        end = middle + block_bytes
        if len(received) < end:
            raise BadFrame(f"a copy in {len(received)} bytes instead of {end}")
        address, block = received[_RELAY.size : middle].decode(), received[middle:end].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise BadFrame(f"invalid copy: {error}") from error
    return Relay(address, block, generation), bytes(received[end:])


def _frame(kind: int, body: bytes) -> bytes:
    return _PREFIX.pack(_MAGIC, kind, len(body)) + body


class Requests:
    """Decodes what a reader sends."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, received: bytes) -> list[Request]:
        """The requests that are complete with these bytes. Raises BadFrame."""
        self._received += received
        requests: list[Request] = []
        while len(self._received) >= _PREFIX.size:
            magic, kind, size = _PREFIX.unpack_from(self._received)
            if magic != _MAGIC:
                raise BadFrame(
                    f"a message begins with {magic!r}: another program, or another version of this one"
                )
            if size > _MOST_FRAME_BYTES:
                raise BadFrame(f"a request of {size} bytes")
            end = _PREFIX.size + size
            if len(self._received) < end:
                break
            requests.append(_request(kind, bytes(self._received[_PREFIX.size : end])))
            del self._received[:end]
        return requests


def _request(kind: int, body: bytes) -> Request:
    try:
        if kind == _OPEN_KIND:
            return Open.decode(body)
        if kind == _READ_KIND:
            start, end, delta = _READ.unpack(body)
            if not (start < end <= start + MOST_RANGE_BYTES and start % CHUNK_BYTES == 0):
                raise BadFrame(f"invalid range: bytes {start} to {end}")
            return Read(start, end, delta)
        if kind == _NAMED_KIND:
            start, end = _NAMED.unpack_from(body)
            if not start < end:  # the bytes of that name bound it
                raise BadFrame(f"invalid named range: bytes {start} to {end}")
            return NamedRange(body[_NAMED.size :].decode(), start, end)
        if kind in (_JOIN_KIND, _LEAVE_KIND):
            copy, version = decode_relay(body)
            return (Join if kind == _JOIN_KIND else Leave)(Open.decode(version), copy)
    except (struct.error, UnicodeDecodeError) as error:
        raise BadFrame(f"invalid request: {error}") from error
    raise BadFrame(f"unknown request {kind}")


class Answer(IntEnum):
    OPENED = 1
    STALE = 2
    FOREIGN = 3
    RAW = 4
    DELTA = 5
    NAMED = 6
    JOINED = 7


@dataclass(frozen=True, slots=True)
class Reply:
    """``size_bytes`` bytes follow. ``number``: of STALE, the version that was found + 1; 0: the owner has none; of
    NAMED, the xxh3_64 of the bytes.
    ``has_base``: of OPENED, deltas against the reader's base can be sent."""

    answer: Answer
    size_bytes: int
    number: int = 0
    has_base: bool = False

    def encode(self) -> bytes:
        """``REPLY_BYTES`` bytes; the ``size_bytes`` bytes that follow are not among them."""
        return _REPLY.pack(_MAGIC, self.answer, self.has_base, self.number, self.size_bytes)

    @classmethod
    def decode(cls, received: bytes | bytearray) -> "Reply":
        """From ``REPLY_BYTES`` bytes. Raises BadFrame."""
        magic, answer, has_base, number, size_bytes = _REPLY.unpack(received)
        if magic != _MAGIC or answer not in Answer.__members__.values():
            raise BadFrame(f"invalid reply {received!r}")
        return cls(Answer(answer), size_bytes, number, has_base)

    def check_joined(self) -> "Reply":
        """Itself, if it is the reply of a Join with a possible size. Raises BadFrame."""
        if self.answer is not Answer.JOINED or self.size_bytes > _MOST_RELAY_BYTES:
            raise BadFrame(f"{self.answer.name} with {self.size_bytes} bytes")
        return self

    def check(self, *, chunks: int | None = None, range_bytes: int | None = None) -> "Reply":
        """Itself, if the bytes that follow have a possible size: of an Open for ``chunks`` chunks, or of a Read of
        ``range_bytes``. Raises BadFrame."""
        if range_bytes is None:
            possible = self.answer in (Answer.STALE, Answer.FOREIGN) and self.size_bytes == 0
            possible |= self.answer is Answer.OPENED and self.size_bytes == 8 * (chunks or 0)
        else:
            possible = self.answer is Answer.RAW and self.size_bytes == range_bytes
            possible |= self.answer is Answer.DELTA and self.size_bytes < range_bytes
        if not possible:
            raise BadFrame(f"{self.answer.name} with {self.size_bytes} bytes")
        return self
