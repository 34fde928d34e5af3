"""What an endpoint takes and gives, compiled once per function: plain data to validated objects."""

import inspect
import reprlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, NotRequired, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, PlainValidator, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from .errors import RemoteProtocolError
from .protocol import codec

Value = TypeVar("Value")

_MARK = "__flexmarl_endpoint__"
_STREAMS = (AsyncIterator, AsyncIterable, AsyncGenerator)


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """What ``@endpoint`` says of a method."""

    idempotent: bool = False


def mark_endpoint(method: Any, options: EndpointOptions) -> None:
    """Raises TypeError where ``method`` can't be called by message."""
    is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    # In a Protocol a stream has no body: it is a plain function that returns an AsyncIterator.
    if not is_async and "Async" not in str(method.__annotations__.get("return")):
        raise TypeError(f"{method.__qualname__}: an endpoint is an async method, or an async generator")
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"{method.__qualname__}: an endpoint names each of its parameters, {parameter} is none"
            )
    setattr(method, _MARK, options)


def endpoint_options(method: Any) -> EndpointOptions | None:
    """The mark that ``mark_endpoint`` has set; None if there is none."""
    options: EndpointOptions | None = getattr(method, _MARK, None)
    return options


_validators: dict[type, Any] = {}


def register_type(
    cls: type[Value], to_plain: Callable[[Value], Any], from_plain: Callable[[Any], Value]
) -> None:
    """Makes ``cls`` an annotation for parameters and results of endpoints.

    ``to_plain`` gives plain data, with ``Buffer`` for what is large; ``from_plain`` is its inverse and raises
    ValueError where the data is none of ``cls``. Fields of dataclasses and models take ``wire_type(cls)``.
    """
    codec.register_encoder(cls, to_plain)

    def receive(value: Any) -> Value:
        return value if isinstance(value, cls) else from_plain(value)

    _validators[cls] = Annotated[cls, PlainValidator(receive)]


def wire_type(annotation: Any) -> Any:
    """``annotation`` with each registered type in it told how it is received."""
    if isinstance(annotation, type) and annotation in _validators:
        return _validators[annotation]
    arguments = get_args(annotation)
    if not arguments:
        return annotation
    origin = get_origin(annotation)
    if origin in _validators:  # NDArray[np.float32], say; what is within it is not checked
        return _validators[origin]
    if origin is Annotated:
        inner = wire_type(arguments[0])
        return annotation if inner is arguments[0] else Annotated[inner, *arguments[1:]]
    wired = tuple(wire_type(argument) for argument in arguments)
    if all(new is old for new, old in zip(wired, arguments, strict=True)):
        return annotation
    if hasattr(annotation, "copy_with"):  # typing's own generics
        return annotation.copy_with(wired)
    return _union(wired) if origin is UnionType else origin[wired]


def _union(members: tuple[Any, ...]) -> Any:
    union = members[0]
    for member in members[1:]:
        union = union | member
    return union


class Signature:
    """The wire form of a function's parameters and result."""

    def __init__(self, function: Callable[..., Any], *, bound: bool = True) -> None:
        """``bound``: the first parameter is ``self`` and is left out."""
        self.name = function.__qualname__
        options = endpoint_options(function)
        self.is_endpoint = options is not None
        self.idempotent = options is not None and options.idempotent
        hints = get_type_hints(function, include_extras=True)
        returned = hints.get("return", Any)
        self.streams = inspect.isasyncgenfunction(function) or get_origin(returned) in _STREAMS
        if self.streams:
            returned = next(iter(get_args(returned)), Any)
        parameters = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
        self._positional = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        annotations = {p.name: wire_type(hints.get(p.name, Any)) for p in parameters}
        fields: dict[str, Any] = {
            p.name: annotations[p.name] if p.default is p.empty else NotRequired[annotations[p.name]]
            for p in parameters
        }
        make: Any = TypedDict  # at run time: a type checker knows only literal definitions
        arguments = make("arguments", fields)
        arguments.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        # The validators themselves: TypeAdapter's methods cost as much again as validating a small message.
        self._arguments = TypeAdapter(arguments).validator
        self._result = TypeAdapter(wire_type(returned)).validator

    def arguments(
        self, args: list[Any] | codec.Undecodable, kwargs: dict[Any, Any], context: Any
    ) -> dict[str, Any]:
        """Keyword arguments for the function. Raises RemoteProtocolError naming the field that is wrong."""
        if args:
            if isinstance(args, codec.Undecodable):
                raise RemoteProtocolError(f"{self.name}: its arguments {args.reason}")
            names = self._positional
            if len(args) > len(names):
                raise RemoteProtocolError(
                    f"{self.name} takes {len(names)} arguments by position, got {len(args)}"
                )
            positional = dict(zip(names, args, strict=False))
            if kwargs and (twice := positional.keys() & kwargs.keys()):
                raise RemoteProtocolError(f"{self.name}: {min(twice)} is given by position and by name")
            kwargs = {**positional, **kwargs} if kwargs else positional
        try:
            return self._arguments.validate_python(kwargs, context=context)  # type: ignore[no-any-return]
        except ValidationError as error:
            raise RemoteProtocolError(f"{self.name}: {_first_problem(error)}") from None

    def result(self, value: Any, context: Any) -> Any:
        """The typed result, or item of a stream. Raises RemoteProtocolError naming the field that is wrong."""
        try:
            return self._result.validate_python(value, context=context)
        except ValidationError as error:
            raise RemoteProtocolError(f"result of {self.name}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "value"
    return f"{where}: {first['msg']} (got {reprlib.repr(first['input'])})"


@lru_cache(maxsize=1024)
def signature_of(owner: type[Any], name: str) -> Signature | None:
    """The signature of the function ``owner.name``, or None where ``owner`` has no such function."""
    function = getattr(owner, name, None)
    return Signature(function) if inspect.isfunction(function) else None


def constructor_signature(owner: type[Any]) -> Signature:
    """The signature of the ``__init__`` of a class. A ``Protocol`` among its bases has one of no meaning."""
    for base in owner.__mro__:
        function = vars(base).get("__init__")
        if inspect.isfunction(function) and not getattr(base, "_is_protocol", False):
            return Signature(function)
    return Signature(_takes_nothing, bound=False)


def _takes_nothing() -> None: ...
