"""MessagePack in both directions: objects to bytes and buffers, and those to plain data.

Dataclasses and pydantic models are sent as maps of their fields. The receiver's annotations alone decide which class is
built from a map (``signature.py``, ``declared_errors.py``), so no message can build an object of an undeclared class.
The only extension type in use stands for "the n-th raw buffer of this message".
"""

import dataclasses
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import Any, TypeVar

import msgpack
from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import core_schema

from ..base.texts import half_problem
from ..errors import LocalProtocolError, RemoteProtocolError

Value = TypeVar("Value")
Bytes = bytes | bytearray | memoryview

# Envelopes hold no bulk data: buffers travel in frames of their own. Several envelopes can share a body.
MAX_ENVELOPE_BYTES = 32 * 2**20
MAX_BODY_BYTES = MAX_ENVELOPE_BYTES + 2 * 2**20
MAX_BUFFERS = 1024
# An empty list takes one byte on the wire and 64 or more in memory, so a limit in bytes does not bound the memory that
# decoding takes. As with bytes, a body may hold more than an envelope. msgpack itself limits nesting to 1024.
MAX_ENVELOPE_ITEMS = 2**20
MAX_BODY_ITEMS = 3 * 2**20
# Below this, copying is cheaper than a frame.
_INLINE_BYTES = 4096
# Up to this size, the memory that announced lengths of nested arrays can claim is small: 340 times 8 KiB.
_SMALL_BYTES = 1024
_BUFFER = 1
_INDEX = struct.Struct("!H")


class Buffer:
    """Raw bytes of any size: received without a copy, and sent without a copy if that is safe.

    The caller must not modify a buffer until the call returns. In one-way messages, results and items of streams, for
    which no caller waits, bytes that their owner could still change are copied: those of a ``bytearray`` or a writable
    array, not those of ``bytes`` or of a read-only array.

    ``view``: flat and read-only.
    """

    __slots__ = ("view",)

    def __init__(self, data: Any) -> None:
        """``data``: anything C-contiguous that supports the buffer protocol. Raises TypeError otherwise."""
        view = memoryview(data)
        if not view.c_contiguous:
            raise TypeError("a buffer must be C-contiguous")
        self.view = (view.cast("B") if view.nbytes else memoryview(b"")).toreadonly()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        def receive(value: Any) -> "Buffer":
            if isinstance(value, Bytes):
                return cls(value)
            raise ValueError("not bytes")

        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else receive(value)
        )


_encoders: dict[type, Callable[[Any], Any]] = {}


def register_encoder(cls: type[Value], to_plain: Callable[[Value], Any]) -> None:
    """Lets values of ``cls`` and its subclasses be sent; ``to_plain`` converts one to plain data and Buffers."""
    _encoders[cls] = to_plain
    _encoder_of.cache_clear()


@lru_cache(maxsize=1024)
def _encoder_of(cls: type) -> Callable[[Any], Any] | None:
    for base in cls.__mro__:
        if base in _encoders:
            return _encoders[base]
    if dataclasses.is_dataclass(cls):
        names = tuple(field.name for field in dataclasses.fields(cls))
        return lambda value: {name: getattr(value, name) for name in names}
    if issubclass(cls, BaseModel):
        return lambda value: value.model_dump(mode="python")
    if hasattr(cls, "__wire__"):
        return lambda value: value.__wire__()
    return str if issubclass(cls, PurePath) else None


class Encoder:
    """Packs values, and sets their large buffers aside. Not for use by several threads at once."""

    def __init__(self, *, inline_bytes: int = _INLINE_BYTES) -> None:
        """``inline_bytes``: buffers of up to this size are packed with the rest."""
        self._inline_bytes = inline_bytes
        self.buffers: list[memoryview] = []
        """Those of the value that was packed last; see ``take_buffers``."""
        self._packer = msgpack.Packer(default=self._to_plain)

    def pack(self, value: Any) -> bytes:
        """The packed value; ``take_buffers`` returns its buffers. Raises LocalProtocolError as ``pack_items``."""
        return self.pack_items((value,))

    def pack_items(self, values: tuple[Any, ...]) -> bytes:
        """Up to 15 values, packed one after the other; ``take_buffers`` returns their buffers.

        Raises LocalProtocolError if a value can't be sent, with the place of a text that holds half of a character.
        """
        try:
            # In an array, as in its body, and one more for decoding: a value that is nested too deep fails here and not
            # at the receiver.
            packed: bytes = self._packer.pack(((values,),))
        except UnicodeEncodeError as error:
            self._forget()
            raise LocalProtocolError(_half_in(values) or str(error)) from error
        except (TypeError, ValueError, OverflowError) as error:
            self._forget()
            raise LocalProtocolError(str(error)) from error
        except BaseException:  # a property or a `__wire__` of the user's
            self._forget()
            raise
        if len(packed) > MAX_ENVELOPE_ITEMS:  # fewer bytes can't hold more items
            self._check_limits(packed[2:])
        return packed[3:]  # without the heads of the three arrays

    def _check_limits(self, packed: bytes) -> None:
        """``packed``: an array of values, which does not count itself."""
        what = ""
        if len(packed) - 1 > MAX_ENVELOPE_BYTES:
            what = f"{len(packed) - 1} bytes is over the limit of {MAX_ENVELOPE_BYTES}"
        else:
            try:
                _unpack_counting(packed, lambda code, data: None, MAX_ENVELOPE_ITEMS + 2)
            except ValueError:
                what = f"more than {MAX_ENVELOPE_ITEMS} values is over the limit"
        if what:
            self._forget()
            raise LocalProtocolError(
                f"a message of {what}: bulk data belongs into arrays or Buffers, which travel beside it, or into the "
                "transport"
            )

    def take_buffers(self) -> list[memoryview]:
        """The buffers of the value that was packed last, in the order of their indexes."""
        buffers = self.buffers
        if buffers:
            self.buffers = []
        return buffers

    def _forget(self) -> None:
        self._packer.reset()
        self.buffers = []

    def _to_plain(self, value: Any) -> Any:
        """One step of converting an object to plain data; the packer calls it for values it does not know."""
        if type(value) is Buffer:
            return self._set_aside(value.view)
        cls: Any = type(value)
        encoder = _encoder_of(cls)
        if encoder is None or isinstance(value, type):
            raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} can't be sent in a message")
        return encoder(value)

    def _set_aside(self, view: memoryview) -> Any:
        if view.nbytes <= self._inline_bytes:
            return bytes(view)
        if self._inline_bytes >= MAX_ENVELOPE_BYTES:  # all buffers must be inline
            raise ValueError(f"a buffer of {view.nbytes} bytes can't be part of a message without frames")
        if len(self.buffers) == MAX_BUFFERS:
            raise ValueError(f"more than {MAX_BUFFERS} buffers in one message")
        self.buffers.append(view)
        return msgpack.ExtType(_BUFFER, _INDEX.pack(len(self.buffers) - 1))


def _half_in(values: tuple[Any, ...]) -> str:
    def plain(value: Any) -> Any:
        cls: Any = type(value)
        encoder = _encoder_of(cls)
        return None if encoder is None else encoder(value)

    return next((problem for value in values if (problem := half_problem(value, plain))), "")


def unchanging(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The buffers, copied where their owner could still change the bytes."""
    return [view if memoryview(view.obj).readonly else memoryview(bytes(view)) for view in buffers]


class UnholdableError(RemoteProtocolError):
    """MessagePack without an equivalent in Python: a map whose key is a list or a map."""


def unpack(packed: Bytes, buffers: Sequence[Bytes] = (), *, max_bytes: int = MAX_BODY_BYTES) -> Any:
    """Plain data. Raises RemoteProtocolError if it is not MessagePack, or over a limit."""
    size = len(packed)
    if size > max_bytes or len(buffers) > MAX_BUFFERS:
        raise RemoteProtocolError(
            f"{size} bytes and {len(buffers)} buffers are over the limit of {max_bytes} bytes"
        )
    extension = _buffer_of(buffers) if buffers else _no_extension
    try:
        if size > _SMALL_BYTES:
            # Walks over the whole message without building anything. The decoder allocates the announced length of an
            # array at once: a few bytes could claim gigabytes if this did not check that its items exist.
            walker = msgpack.Unpacker(None, max_buffer_size=size)
            walker.feed(packed)
            walker.skip()
        if size > MAX_BODY_ITEMS:
            return _unpack_counting(packed, extension, MAX_BODY_ITEMS)
        # A timestamp, which flexmarl never sends, becomes a number, so that all results are plain data.
        return msgpack.unpackb(packed, strict_map_key=False, ext_hook=extension, timestamp=2)
    except TypeError as error:
        raise UnholdableError(f"not MessagePack for Python: {error}") from error
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"not MessagePack: {error or type(error).__name__}") from error


def _unpack_counting(packed: Bytes, extension: Callable[[int, bytes], Any], limit: int) -> Any:
    """Raises ValueError as soon as there are more than ``limit`` values in the containers that are complete."""
    room = limit

    def count(container: Any) -> Any:
        nonlocal room
        room -= len(container) + 1
        if room < 0:
            raise ValueError(f"more than {limit} values")
        return container

    return msgpack.unpackb(
        packed,
        strict_map_key=False,
        ext_hook=extension,
        timestamp=2,
        list_hook=count,
        object_hook=count,
        max_array_len=limit,
        max_map_len=limit,
    )


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} without a buffer to stand for")


def _buffer_of(buffers: Sequence[Bytes]) -> Callable[[int, bytes], Bytes]:
    def hook(code: int, data: bytes) -> Bytes:
        if code != _BUFFER or len(data) != _INDEX.size or (index := _INDEX.unpack(data)[0]) >= len(buffers):
            raise ValueError(f"extension type {code} stands for no buffer of this message")
        buffer: Bytes = buffers[index]
        return buffer

    return hook
