"""Signatures of endpoints, compiled once per function: plain data to validated arguments, results and errors."""

import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from .errors import RemoteProtocolError
from .protocol.declared_errors import DeclaredErrors
from .protocol.messages import Undecodable
from .protocol.wire_types import arguments_validator, first_problem, wire_type

_MARK = "__flexmarl_endpoint__"
_STREAMS = (AsyncIterator, AsyncIterable, AsyncGenerator)


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """The options of ``@endpoint``."""

    raises: tuple[type[Exception], ...] = ()
    """The error classes that callers get as such."""


def mark_endpoint(method: Any, options: EndpointOptions) -> None:
    """Raises TypeError if ``method`` can't be called by message, or can't declare one of ``raises``."""
    is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    # In a Protocol a stream has no body: it is a plain function that returns an AsyncIterator.
    if not is_async and "Async" not in str(method.__annotations__.get("return")):
        raise TypeError(f"{method.__qualname__}: an endpoint is an async method, or an async generator")
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"{method.__qualname__}: an endpoint names each of its parameters, {parameter} is not allowed"
            )
    try:
        DeclaredErrors(options.raises)
    except TypeError as error:
        raise TypeError(f"{method.__qualname__}: {error}") from None
    setattr(method, _MARK, options)


def endpoint_options(method: Any) -> EndpointOptions | None:
    """The mark that ``mark_endpoint`` has set; None for an unmarked method."""
    options: EndpointOptions | None = getattr(method, _MARK, None)
    return options


class Signature:
    """The wire form of a function's parameters and result."""

    def __init__(
        self, function: Callable[..., Any], *, bound: bool = True, inherited: Iterable[type[Exception]] = ()
    ) -> None:
        """``bound``: the first parameter is ``self`` and is left out. ``inherited``: declared errors besides the
        function's own."""
        self.name = function.__qualname__
        options = endpoint_options(function)
        self.is_endpoint = options is not None
        self.errors = DeclaredErrors((*(options.raises if options is not None else ()), *inherited))
        hints = get_type_hints(function, include_extras=True)
        returned = hints.get("return", Any)
        self.streams = inspect.isasyncgenfunction(function) or get_origin(returned) in _STREAMS
        if self.streams:
            returned = next(iter(get_args(returned)), Any)
        parameters = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
        by_position = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        self._positional = tuple(p.name for p in parameters if p.kind in by_position)
        self._arguments = arguments_validator(parameters, hints)
        self._needs_none = all(p.default is not p.empty for p in parameters)
        self._result = TypeAdapter(wire_type(returned)).validator

    def arguments(
        self, args: list[Any] | Undecodable, kwargs: dict[Any, Any], context: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for the function, by position and by name. Raises RemoteProtocolError naming the field that is
        wrong."""
        arguments: Any = args
        if not args:
            if not kwargs and self._needs_none:
                return (), {}
            arguments = kwargs
        elif isinstance(args, Undecodable):
            raise RemoteProtocolError(f"{self.name}: its arguments {args.reason}")
        elif kwargs:
            arguments = ArgsKwargs(tuple(args), kwargs)
        try:
            return self._arguments.validate_python(arguments, context=context)  # type: ignore[no-any-return]
        except ValidationError as error:
            if error.errors(include_url=False)[0]["type"] == "unexpected_positional_argument":
                problem = f"{self.name} takes {len(self._positional)} arguments by position, got more"
            else:
                problem = f"{self.name}: {first_problem(error, self._positional)}"
            raise RemoteProtocolError(problem) from None

    def result(self, value: Any, context: Any) -> Any:
        """The typed result, or item of a stream. Raises RemoteProtocolError naming the field that is wrong."""
        try:
            return self._result.validate_python(value, context=context)
        except ValidationError as error:
            raise RemoteProtocolError(f"result of {self.name}: {first_problem(error)}") from None


@lru_cache(maxsize=1024)
def signature_of(owner: type[Any], name: str) -> Signature | None:
    """The signature of the function ``owner.name``, or None if ``owner`` has no such function.

    It declares the errors of the endpoint and of those that it overrides: a class that derives from the protocol of
    its callers need not repeat them.
    """
    function = getattr(owner, name, None)
    if not inspect.isfunction(function):
        return None
    overridden = [endpoint_options(vars(base).get(name)) for base in owner.__mro__]
    inherited = [cls for options in overridden if options is not None for cls in options.raises]
    return Signature(function, inherited=inherited)


@functools.cache
def constructor_signature(owner: type[Any]) -> Signature:
    """The signature of the ``__init__`` of a class. A ``Protocol`` among its bases has one of no meaning."""
    for base in owner.__mro__:
        function = vars(base).get("__init__")
        if inspect.isfunction(function) and not getattr(base, "_is_protocol", False):
            return Signature(function)
    return Signature(_takes_nothing, bound=False)


def _takes_nothing() -> None: ...
