"""The messages between a worker and the processes of its pool: length-prefixed MessagePack over pipes, plain data.

A function is sent as its module and name. Arguments and results become what the function's annotations say, as those of
an actor's endpoint do: without annotations they are plain data, and a tuple arrives as a list.
"""

import inspect
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ...core.errors import LocalProtocolError
from ...core.protocol.codec import MAX_ENVELOPE_BYTES, Encoder, unpack
from ...core.protocol.wire_types import first_problem, wire_type
from ...transport import message_arrays  # noqa: F401  # lets arrays be sent

LENGTH: Final = struct.Struct("!I")
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def frame(message: Any) -> bytes:
    """Raises ValueError for what can't be sent."""
    try:
        body = Encoder(inline_bytes=MAX_ENVELOPE_BYTES - 1).pack(message)
    except LocalProtocolError as error:
        raise ValueError(str(error)) from None
    return LENGTH.pack(len(body)) + body


def message_of(body: bytes) -> Any:
    """The message in a frame's ``body``, without the length before it. Raises RemoteProtocolError if it is damaged."""
    return unpack(body)


def arguments_of(function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """``args`` as the function's annotations say. Raises ValueError, which names the parameter."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a function without a signature, written in C
        return list(args)
    hints = _hints(function)
    names = [p.name for p in parameters if p.kind in _POSITIONAL]
    rest = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    names += rest * (len(args) - len(names))
    converted = [
        _convert(value, hints[name], name) if name in hints else value
        for name, value in zip(names, args, strict=False)
    ]
    return [*converted, *args[len(converted) :]]


def result_of(function: Callable[..., Any], value: Any) -> Any:
    """``value`` as the function's annotations say. Raises ValueError."""
    hints = _hints(function)
    return _convert(value, hints["return"], "result") if "return" in hints else value


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except TypeError:  # written in C
        return {}


def _convert(value: Any, annotation: Any, name: str) -> Any:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(wire_type(annotation))
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{name}: {first_problem(error)}") from None
