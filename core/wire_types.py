"""Annotations of endpoints as pydantic validates them: registered types, and the fields of a call or an error."""

import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, NotRequired, TypeVar, get_args, get_origin

from pydantic import ConfigDict, PlainValidator, ValidationError
from typing_extensions import TypedDict

from .protocol import codec

Value = TypeVar("Value")

_validators: dict[type, Any] = {}


def register_type(
    cls: type[Value], to_plain: Callable[[Value], Any], from_plain: Callable[[Any], Value]
) -> None:
    """Makes ``cls`` an annotation for parameters and results of endpoints.

    ``to_plain`` gives plain data, with a ``Buffer`` for large data; ``from_plain`` is its inverse and raises ValueError
    for invalid data. Fields of dataclasses and models take ``wire_type(cls)``.
    """
    codec.register_encoder(cls, to_plain)

    def receive(value: Any) -> Value:
        return value if isinstance(value, cls) else from_plain(value)

    _validators[cls] = Annotated[cls, PlainValidator(receive)]


def wire_type(annotation: Any) -> Any:
    """``annotation`` with the validator of each registered type in it."""
    if isinstance(annotation, type) and annotation in _validators:
        return _validators[annotation]
    arguments = get_args(annotation)
    if not arguments:
        return annotation
    origin = get_origin(annotation)
    if origin in _validators:  # NDArray[np.float32], say; its parameters are not checked
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


def fields_type(parameters: Iterable[inspect.Parameter], hints: Mapping[str, Any], *, arbitrary: bool) -> Any:
    """A TypedDict of a function's parameters, by name; those with defaults may be missing.

    ``arbitrary``: annotations that pydantic can't validate are allowed, and take instances only.
    """
    fields: dict[str, Any] = {}
    for parameter in parameters:
        wired = wire_type(hints.get(parameter.name, Any))
        fields[parameter.name] = wired if parameter.default is parameter.empty else NotRequired[wired]
    make: Any = TypedDict  # at run time: a type checker knows only literal definitions
    made = make("arguments", fields)
    made.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=arbitrary)
    return made


def first_problem(error: ValidationError) -> str:
    """The first invalid field, the problem and the value."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "value"
    return f"{where}: {first['msg']} (got {reprlib.repr(first['input'])})"
