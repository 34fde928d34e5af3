"""Annotations of endpoints as pydantic validates them: registered types, and the fields of a call or an error."""

import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, TypeVar, get_args, get_origin

from pydantic import ConfigDict, GetCoreSchemaHandler, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import core_schema
from typing_extensions import TypedDict

from ..protocol import codec

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


def fields_type(parameters: Iterable[inspect.Parameter], hints: Mapping[str, Any]) -> Any:
    """A TypedDict of a function's parameters, by name; those with defaults may be missing."""
    fields: dict[str, Any] = {}
    for parameter in parameters:
        wired = wire_type(hints.get(parameter.name, Any))
        fields[parameter.name] = wired if parameter.default is parameter.empty else NotRequired[wired]
    make: Any = TypedDict  # at run time: a type checker knows only literal definitions
    fields_class = make("fields", fields)
    fields_class.__pydantic_config__ = ConfigDict(extra="forbid")
    return fields_class


def arguments_validator(parameters: Iterable[inspect.Parameter], hints: Mapping[str, Any]) -> Any:
    """Validates the arguments of a call: a list of those by position, a dict of those by name, or ``ArgsKwargs`` of
    both. Returns both, with the defaults of those that are missing; of a default that can change, a copy.

    Annotations that pydantic can't validate are allowed, and take instances only.
    """

    class Arguments:
        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
            schemas = [(p, handler.generate_schema(wire_type(hints.get(p.name, Any)))) for p in parameters]
            rest: dict[str, Any] = {_REST[p.kind]: schema for p, schema in schemas if p.kind in _REST}
            named = [_argument(p, schema) for p, schema in schemas if p.kind not in _REST]
            plain = core_schema.simple_ser_schema("any")
            return core_schema.arguments_schema(named, serialization=plain, **rest)

    # The validator itself: TypeAdapter's methods cost as much again as validating a small message.
    return TypeAdapter(Arguments, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True)).validator


_MODES: dict[Any, Literal["positional_only", "positional_or_keyword", "keyword_only"]] = {
    inspect.Parameter.POSITIONAL_ONLY: "positional_only",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional_or_keyword",
    inspect.Parameter.KEYWORD_ONLY: "keyword_only",
}
# *args and **kwargs: each of their values is of the annotation's type.
_REST: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "var_args_schema",
    inspect.Parameter.VAR_KEYWORD: "var_kwargs_schema",
}


def _argument(parameter: inspect.Parameter, schema: Any) -> Any:
    if parameter.default is not parameter.empty:
        schema = core_schema.with_default_schema(schema, default=parameter.default)
    return core_schema.arguments_parameter(parameter.name, schema, mode=_MODES[parameter.kind])


def first_problem(error: ValidationError, positional: Sequence[str] = ()) -> str:
    """The first invalid field, the problem and the value. ``positional``: the names of arguments that are given by
    position."""
    first = error.errors(include_url=False)[0]
    where = [str(part) for part in first["loc"]]
    index = first["loc"][0] if first["loc"] and first["type"] != "invalid_key" else None
    if isinstance(index, int) and index < len(positional):
        where[0] = positional[index]
    return f"{'.'.join(where) or 'value'}: {first['msg']} (got {reprlib.repr(first['input'])})"
