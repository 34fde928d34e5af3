"""The messages between a worker and the processes of its pool: length-prefixed MessagePack over pipes, plain data.

A function is sent as its module and name. Arguments and results become what the function's annotations say, as those of
an actor's endpoint do: without annotations they are plain data, and a tuple arrives as a list.
"""

import asyncio
import inspect
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ...core.errors import LocalProtocolError
from ...core.protocol.codec import MAX_ENVELOPE_BYTES, Encoder, unpack
from ...core.protocol.wire_types import first_problem, wire_type
from ...transport import message_arrays  # noqa: F401  # lets arrays be sent
from ..errors import ProcessFailed
from ..messages import Computed, FunctionCall
from ..recipe.recipe import MODULE_PREFIX

Result = TypeVar("Result")

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


def call_of(
    function: Callable[..., Any],
    args: Sequence[Any],
    timeout_s: float,
    setting: str = "timeout_s",
    queue_timeout_s: float | None = None,
    retries: int = 0,
) -> FunctionCall:
    """The message that calls ``function(*args)`` in another process; the others as in ``FunctionCall``. Raises
    ValueError for a function or an argument that can't be sent, and for a limit that is not positive."""
    name = _full_name(function)
    if timeout_s <= 0:
        raise ValueError(f"{name}: timeout_s={timeout_s!r} must be positive")
    body = frame({"module": function.__module__, "name": function.__qualname__, "args": list(args)})
    return FunctionCall(name, body, timeout_s, setting, queue_timeout_s, retries)


def end_of(function: Callable[..., Result], call: FunctionCall, computed: Computed) -> Result:
    """The result of a call of ``function``. Raises TimeoutError if it overran, ProcessFailed for an error of the
    function and if its process has ended, ValueError for a result that is not as the annotations say."""
    if computed.overran:
        raise TimeoutError(f"{call.name} {computed.problem}")
    if computed.problem:
        raise ProcessFailed(call.name, computed.problem)
    answer = message_of(computed.answer)
    if "result" in answer:
        return result_of(function, answer["result"])  # type: ignore[no-any-return]
    raise ProcessFailed(call.name, f"{answer['kind']}: {answer['text']}", answer["traceback"])


def _full_name(function: Callable[..., Any]) -> str:
    """Raises ValueError for a function that another process can't find by its name."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    target: Any = sys.modules.get(module or "")
    for part in (name or "").split("."):
        target = getattr(target, part, None)
    if module is None or name is None or target is not function:
        raise ValueError(
            f"{function!r} can't be called in another process: it is not at the top level of a module"
        )
    if module == "__main__":
        raise ValueError(
            f"{name} can't be called in another process: it is in the main program; put it into a module that can be "
            "imported"
        )
    if asyncio.iscoroutinefunction(function):
        raise ValueError(f"{module}.{name} is async: await it")
    # A recipe's functions have the name of their file, as its author knows it.
    return f"{'workflow' if module.startswith(MODULE_PREFIX) else module}.{name}"


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
