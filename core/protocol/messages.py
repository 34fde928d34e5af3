"""Messages: envelopes to a frame, and a frame to envelopes of the right shape. Their forms are in ``envelopes.py``.

A message is unpacked at once, and its envelopes are checked before any is processed. Requests to one endpoint, and
replies, that follow one another share an envelope, a *run*: their common fields are packed, checked and looked up once.
"""

import dataclasses
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from ..base.texts import half_problem
from ..errors import LocalProtocolError, RemoteProtocolError
from .codec import MAX_BODY_ITEMS, Bytes, UnholdableError, unpack
from .envelopes import FIELDS, ITEM_FIELDS, MAGIC, REQUESTS, VERSION, Envelope, Fault, Kind

MAX_HEADER_BYTES = 4096
# Names of actors and endpoints are short. With its fields an envelope is that much larger than its items at most.
_MAX_SHARED_BYTES = 64 * 2**10

# --------------------------------------------------------------------------- the header


def pack_header(node: str, epoch: int) -> bytes:
    """The header of every message of this side. ``node``: the name of its system, kept short by ``checked_name``."""
    header: bytes = msgpack.packb([MAGIC, VERSION, node, epoch])
    return header


def unpack_header(message: Bytes) -> tuple[str, int, int]:
    """Node and epoch of the sender, and the size of the header, with which a message begins.

    Raises RemoteProtocolError if the header is invalid, or of another version.
    """
    walker = msgpack.Unpacker(None, max_buffer_size=MAX_HEADER_BYTES)
    walker.feed(memoryview(message)[:MAX_HEADER_BYTES])
    try:
        walker.skip()
    except (ValueError, msgpack.UnpackException):
        raise RemoteProtocolError("not a flexmarl message") from None
    size = walker.tell()
    match unpack(message[:size]):
        case [str(magic), int(version), *_] if magic == MAGIC and version != VERSION:
            raise RemoteProtocolError(f"the peer speaks protocol version {version}, this side {VERSION}")
        case [str(magic), int(), str(node), int(epoch)] if magic == MAGIC:
            return node, epoch, size
    raise RemoteProtocolError("not a flexmarl message")


# --------------------------------------------------------------------------- packing


def join(packed: Sequence[bytes], header: bytes = b"") -> bytes:
    """One MessagePack array of items that are packed already, after ``header``."""
    return b"".join((header, _array_head(len(packed)), *packed))


def _array_head(count: int) -> bytes:
    return _SHORT_ARRAYS[count] if count < 16 else _LONG_ARRAY.pack(0xDD, count)


# https://github.com/msgpack/msgpack/blob/master/spec.md: fixarray, and array 32.
_SHORT_ARRAYS = [bytes((0x90 | count,)) for count in range(16)]
_LONG_ARRAY = struct.Struct("!BI")
# The head of an array of up to 15 items, a small number, and a number of 64 bits. An id always takes 64, also a
# small one, for which msgpack would take fewer: so one struct packs the head of every run.
_RUN_HEAD = struct.Struct("!BBBQ")


class RunHead:
    """The fields that the items of a run share; compared by identity."""

    __slots__ = ("_array", "_kind", "_shared", "_width")

    def __init__(self, kind: Kind, shared: bytes) -> None:
        """``shared``: the fields between the id and the items, packed."""
        self._kind = int(kind)
        self._array = 0x90 | len(FIELDS[kind])
        self._shared = shared
        self._width = len(ITEM_FIELDS[kind])

    def pack(self, first_id: int, items: Sequence[bytes], further: bytes = b"") -> bytes:
        """The envelope of a run whose first item has that id. ``further``: shared fields of this run only."""
        head = _RUN_HEAD.pack(self._array, self._kind, 0xCF, first_id)
        return b"".join((head, self._shared, further, _array_head(self._width * len(items)), *items))


REPLIES = RunHead(Kind.REPLY, b"")


def check_timeout(timeout_s: float) -> None:
    """Raises ValueError if it is negative, or NaN, which has no place in the order of deadlines."""
    if not timeout_s >= 0.0:
        raise ValueError(f"timeout_s must not be negative, got {timeout_s!r}")


class RequestHead(RunHead):
    """The head of requests of one kind to one endpoint. Raises LocalProtocolError if the names are too long, ValueError
    if ``timeout_s`` is negative or NaN."""

    __slots__ = ("actor", "endpoint", "kind", "timeout_s")

    def __init__(self, kind: Kind, actor: str, endpoint: str, timeout_s: float) -> None:
        check_timeout(timeout_s)
        fields = (actor, endpoint, float(timeout_s))
        # Without the head of the array.
        try:
            shared: bytes = msgpack.packb(fields)[1:]
        except UnicodeEncodeError as error:
            raise LocalProtocolError(f"names of actors and endpoints: {half_problem(fields)}") from error
        if len(shared) > _MAX_SHARED_BYTES:
            raise LocalProtocolError(
                f"names of {len(shared)} bytes are over the limit of {_MAX_SHARED_BYTES}"
            )
        super().__init__(kind, shared)
        self.kind = kind
        self.actor = actor
        self.endpoint = endpoint
        self.timeout_s = timeout_s


# --------------------------------------------------------------------------- unpacking


def unpack_envelopes(body: Bytes, buffers: Sequence[Bytes] = ()) -> list[Envelope]:
    """Raises RemoteProtocolError if an envelope does not have the shape of its kind.

    If one holds a value that Python can't represent, it is replaced: a request's arguments by ``Undecodable``, a result
    by an ERROR, the fields of an ERROR by none. The other envelopes of the message are still processed.
    """
    try:
        envelopes = unpack(body, buffers)
    except UnholdableError as error:
        if len(body) > MAX_BODY_ITEMS:  # decoded one by one they would not be counted together
            raise
        return _unpack_one_by_one(body, buffers, error)
    if type(envelopes) is not list:
        raise RemoteProtocolError("malformed message: no array of envelopes")
    _check_shapes(envelopes)
    return envelopes


@dataclasses.dataclass(frozen=True, slots=True)
class Undecodable:
    """Replaces arguments that Python can't represent."""

    reason: str


def _unpack_one_by_one(body: Bytes, buffers: Sequence[Bytes], error: RemoteProtocolError) -> list[Envelope]:
    """Raises ``error`` if the body is not an array of envelopes."""
    envelopes: list[Envelope] = []
    for packed in _elements(body, error):
        try:
            envelopes.append(unpack(packed, buffers))
        except UnholdableError as unholdable:
            envelopes += _replacements(packed, buffers, unholdable)
    _check_shapes(envelopes)
    return envelopes


def _replacements(packed: Bytes, buffers: Sequence[Bytes], error: RemoteProtocolError) -> list[Envelope]:
    """The envelopes to process instead of one whose last field holds a value that Python can't represent. Raises
    ``error`` if another field does, or it has none."""

    def value_of(packed: Bytes) -> Any:
        try:
            return unpack(packed, buffers)
        except UnholdableError:
            return Undecodable(f"can't be decoded: {error}")

    parts = _elements(packed, error)
    match [value_of(part) for part in parts]:
        case [int(kind), int(), *_, Undecodable()] as fields if kind in _REQUESTS:
            items = [value_of(part) for part in _elements(parts[-1], error)]
            for index in range(1, len(items), 3):
                if isinstance(items[index], Undecodable):  # arguments by name
                    items[index - 1 : index + 1] = items[index], {}
            return [[*fields[:-1], items]]
        case [Kind.REPLY, int(first), Undecodable()]:
            values = map(value_of, _elements(parts[-1], error))
            return [_reply(first + index, value) for index, value in enumerate(values)]
        case [Kind.ITEM, int(request_id), int(), Undecodable() as value]:
            return [_reply(request_id, value)]
        case [Kind.ERROR, int(), *_, Undecodable()] as fields:
            return [[*fields[:5], "", {}]]
    raise error


def _reply(request_id: int, value: Any) -> Envelope:
    if isinstance(value, Undecodable):
        return [int(Kind.ERROR), request_id, str(Fault.PROTOCOL), f"the result {value.reason}", "", "", {}]
    return [int(Kind.REPLY), request_id, [value]]


def _elements(packed: Bytes, error: RemoteProtocolError) -> list[Bytes]:
    """The elements of an array, packed. Raises ``error`` if it is not one."""
    walker = msgpack.Unpacker(None, max_buffer_size=len(packed))
    walker.feed(packed)
    cuts = []
    try:
        for _ in range(walker.read_array_header()):
            cuts.append(walker.tell())
            walker.skip()
    except (ValueError, msgpack.UnpackException):
        raise error from None
    return [packed[start:end] for start, end in zip(cuts, [*cuts[1:], len(packed)], strict=True)]


# --------------------------------------------------------------------------- shapes


def _check_shapes(envelopes: list[Any]) -> None:
    try:
        for envelope in envelopes:
            if type(envelope) is not list or not _CHECKS[envelope[0]](envelope):
                raise RemoteProtocolError("malformed envelope")
    except (KeyError, IndexError, TypeError):  # of an unknown kind, empty, or of an invalid kind
        raise RemoteProtocolError("malformed envelope") from None


_REQUESTS = frozenset(map(int, REQUESTS))
_SHAPES: dict[int, tuple[type, ...]] = {int(kind): fields for kind, fields in FIELDS.items()}
_ARGUMENTS = frozenset({list, Undecodable})
_MAX_ID = 2**62


def _has_shape(envelope: Envelope) -> bool:
    return tuple(map(type, envelope)) == _SHAPES[envelope[0]]


def _holds_requests(envelope: Envelope) -> bool:
    # The time is positive: NaN, as a timer, would upset all others.
    if not (_has_shape(envelope) and envelope[4] >= 0.0 and 0 <= envelope[1] <= _MAX_ID):
        return False
    items = envelope[-1]
    if len(items) == 3:
        return type(items[0]) in _ARGUMENTS and type(items[1]) is dict and type(items[2]) is int
    return (
        len(items) > 0
        and len(items) % 3 == 0
        and _ARGUMENTS.issuperset(map(type, items[::3]))
        and {dict}.issuperset(map(type, items[1::3]))
        and {int}.issuperset(map(type, items[2::3]))
    )


def _holds_replies(envelope: Envelope) -> bool:
    return _has_shape(envelope) and len(envelope[2]) > 0


def _holds_item(envelope: Envelope) -> bool:
    return len(envelope) == 4 and tuple(map(type, envelope[:3])) == (int, int, int)


def _holds_ids(envelope: Envelope) -> bool:
    return _has_shape(envelope) and {int}.issuperset(map(type, envelope[2]))


_CHECKS: dict[int, Callable[[Envelope], bool]] = {
    **dict.fromkeys(_SHAPES, _has_shape),
    **dict.fromkeys(_REQUESTS, _holds_requests),
    int(Kind.REPLY): _holds_replies,
    int(Kind.ITEM): _holds_item,
    int(Kind.DONE): _holds_ids,
    int(Kind.PONG): _holds_ids,
}
