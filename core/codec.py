"""MessagePack in both directions: typed objects to bytes, bytes to validated objects.

Dataclasses and pydantic models are sent as maps of their fields. Nothing on the wire names a class: what
a map becomes is decided by the receiver's annotations alone (``TypeAdapter``), so no message can build an
object the endpoint did not ask for.
"""

import dataclasses
import inspect
from collections.abc import Callable
from functools import lru_cache
from pathlib import PurePath
from typing import Any, NotRequired, get_type_hints

import msgpack
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from .errors import LocalProtocolError, RemoteProtocolError
from .messages import FIELDS, MAGIC, VERSION, Envelope, Kind


@lru_cache(maxsize=1024)
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


def _to_plain(value: Any) -> Any:
    """One step from an object towards what MessagePack knows; called by the packer for what it does not."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in _field_names(type(value))}
    if isinstance(value, BaseModel):
        return value.model_dump(mode="python")
    if hasattr(value, "__wire__"):
        return value.__wire__()
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} can't be sent in a message")


def pack(value: Any) -> bytes:
    """Raises LocalProtocolError where ``value`` holds something that is no plain data.

    A lone surrogate, which JSON can spell and UTF-8 can't carry, arrives as its escape: ``\\ud83d``.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_to_plain, unicode_errors="backslashreplace")
        return packed
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(str(error)) from error


def join(packed: list[bytes]) -> bytes:
    """One MessagePack array of items that are packed already."""
    return bytes(msgpack.Packer().pack_array_header(len(packed))) + b"".join(packed)


def pack_header(sender: str) -> bytes:
    return pack([MAGIC, VERSION, sender])


def unpack_message(header: bytes, body: bytes) -> list[Envelope]:
    """The envelopes of a message. Raises RemoteProtocolError where it is no message of ours."""
    try:
        head = msgpack.unpackb(header)
        if not isinstance(head, list) or len(head) != 3 or head[0] != MAGIC:
            raise RemoteProtocolError("not a flexmarl message")
        if head[1] != VERSION:
            raise RemoteProtocolError(f"the peer speaks protocol version {head[1]}, this side {VERSION}")
        envelopes = msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"not MessagePack: {error}") from error
    if not isinstance(envelopes, list) or not all(map(_is_envelope, envelopes)):
        raise RemoteProtocolError("malformed envelope")
    return envelopes


def _is_envelope(item: Any) -> bool:
    if not isinstance(item, list) or len(item) < 2 or type(item[1]) is not int:
        return False
    if type(item[0]) is not int or item[0] not in FIELDS or len(item) != FIELDS[Kind(item[0])]:
        return False
    if item[0] in (Kind.CALL, Kind.TELL):
        return (
            isinstance(item[2], str)
            and isinstance(item[3], str)
            and isinstance(item[4], float)
            and isinstance(item[5], list)
            and isinstance(item[6], dict)
        )
    return item[0] != Kind.ERROR or all(isinstance(part, str) for part in item[2:])


class Signature:
    """The wire form of a function's parameters and result, compiled once per function."""

    def __init__(self, function: Callable[..., Any], *, bound: bool = True) -> None:
        """``bound``: the first parameter is ``self`` and is left out."""
        self.name = function.__qualname__
        hints = get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
        self._names = tuple(p.name for p in parameters)
        fields: dict[str, Any] = {
            p.name: hints.get(p.name, Any) if p.default is p.empty else NotRequired[hints.get(p.name, Any)]
            for p in parameters
        }
        make: Any = TypedDict  # at run time: a type checker knows only literal definitions
        arguments = make("arguments", fields)
        arguments.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        self._arguments: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)
        self._result: TypeAdapter[Any] = TypeAdapter(hints.get("return", Any))

    def arguments(self, args: list[Any], kwargs: dict[str, Any], context: Any) -> dict[str, Any]:
        """Keyword arguments for the function. Raises RemoteProtocolError naming the field that is wrong."""
        if len(args) > len(self._names):
            raise RemoteProtocolError(f"{self.name} takes {len(self._names)} arguments, got {len(args)}")
        try:
            return self._arguments.validate_python(
                {**dict(zip(self._names, args, strict=False)), **kwargs}, context=context
            )
        except ValidationError as error:
            raise RemoteProtocolError(f"{self.name}: {_first_problem(error)}") from None

    def result(self, value: Any, context: Any) -> Any:
        """The typed result. Raises RemoteProtocolError naming the field that is wrong."""
        try:
            return self._result.validate_python(value, context=context)
        except ValidationError as error:
            raise RemoteProtocolError(f"result of {self.name}: {_first_problem(error)}") from None


def _takes_nothing() -> None: ...


NO_ARGUMENTS = Signature(_takes_nothing, bound=False)


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "value"
    return f"{where}: {first['msg']} (got {first['input']!r:.80})"


@lru_cache(maxsize=1024)
def signature_of(owner: type[Any], endpoint: str) -> Signature | None:
    """The signature of ``owner.endpoint``, or None where ``owner`` has no such function."""
    function = getattr(owner, endpoint, None)
    return Signature(function) if inspect.isfunction(function) else None
