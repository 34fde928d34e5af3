"""Errors that an endpoint declares, ``@endpoint(raises=(...))``, as they cross the wire.

Rules:
- An error travels as plain fields: the parameters of its class's constructor, each read from the attribute of the same
  name. A class without a constructor of its own travels as its text. A class that does not fit is refused when the
  endpoint is declared.
- The caller's declaration decides which class is built. No class is imported or looked up by a name from the wire, and
  the fields are validated against the annotations of the constructor, as arguments of a call are.
- An error of an undeclared subclass arrives as the nearest declared class among its bases.
- An error that is undeclared, can't be encoded, or has invalid fields arrives as RemoteError: none is lost.
"""

import dis
import inspect
from collections.abc import Iterable
from functools import lru_cache
from itertools import takewhile
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from ..base.texts import escaped, text_of
from ..errors import RemoteError
from .wire_types import fields_type, first_problem

_NOT_BY_COROUTINES = (StopIteration, StopAsyncIteration)


class _ErrorClass:
    """One declared class. ``names``: the fields; None for a class that travels as its text."""

    def __init__(self, cls: type[Exception]) -> None:
        """Raises TypeError if errors of ``cls`` can't be rebuilt from plain fields."""
        if not (isinstance(cls, type) and issubclass(cls, Exception)) or issubclass(cls, _NOT_BY_COROUTINES):
            raise TypeError(f"{cls!r} can't be declared: a class of exceptions is wanted")
        self.cls = cls
        constructor: Any = cls.__init__
        self.names: tuple[str, ...] | None = None
        if not inspect.isfunction(constructor):
            if cls.__str__ is not BaseException.__str__:
                raise TypeError(f"{cls.__name__} can't be declared: its text is not its only argument")
            return
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        hints = get_type_hints(constructor, include_extras=True)
        _check_parameters(cls, parameters, hints)
        self.names = tuple(parameter.name for parameter in parameters)
        self._positional = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        try:
            self._validator = TypeAdapter(fields_type(parameters, hints)).validator
        except PydanticUserError as error:
            problem = str(error).splitlines()[0]
            raise TypeError(
                f"{cls.__name__} can't be declared: its fields can't be sent: {problem}"
            ) from None

    def fields(self, error: Exception) -> dict[str, Any]:
        """Texts as they can be sent to people. Raises AttributeError, or the error of a property of the class."""
        values = {name: getattr(error, name) for name in self.names or ()}
        return {name: escaped(value) if isinstance(value, str) else value for name, value in values.items()}

    def build(self, fields: dict[Any, Any], text: str, context: Any) -> Exception:
        """Raises ValueError if the fields are invalid, or the error of the constructor."""
        if self.names is None:
            if fields:
                raise ValueError("it has no fields")
            return self.cls(text)
        try:
            valid = self._validator.validate_python(fields, context=context)
        except ValidationError as error:
            raise ValueError(first_problem(error)) from None
        # By position as far as that goes: ``BaseException`` keeps such arguments as ``args``.
        leading = takewhile(valid.__contains__, self._positional)
        return self.cls(*[valid.pop(name) for name in leading], **valid)


def _check_parameters(cls: type, parameters: list[inspect.Parameter], hints: dict[str, Any]) -> None:
    stored = _stored_attributes(cls)
    for parameter in parameters:
        problem = ""
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            problem = "can't be given by name"
        elif parameter.name not in hints:
            problem = "has no annotation"
        elif parameter.name not in stored:
            problem = "is not kept as an attribute of the same name"
        if problem:
            raise TypeError(f"{cls.__name__} can't be declared: its constructor's {parameter} {problem}")


def _stored_attributes(cls: type) -> set[str]:
    """The names that the constructors of ``cls`` and its bases assign to, and its properties."""
    # Why the bytecode, and not ``vars`` of the first error that is sent: a class that does not fit would show in the
    # middle of a run, in place of the error that it should report, and not when the endpoint is declared. Why not the
    # source: a class that was defined at a prompt has none.
    stored: set[str] = set()
    for base in cls.__mro__:
        stored.update(name for name, value in vars(base).items() if isinstance(value, property))
        constructor = vars(base).get("__init__")
        if inspect.isfunction(constructor):
            steps = dis.get_instructions(constructor)
            stored.update(step.argval for step in steps if step.opname == "STORE_ATTR")
    return stored


@lru_cache(maxsize=1024)
def _error_class(cls: type[Exception]) -> _ErrorClass:
    return _ErrorClass(cls)


class DeclaredErrors:
    """The error classes that one endpoint declares."""

    def __init__(self, classes: Iterable[type[Exception]]) -> None:
        """Raises TypeError if one can't be declared, or two have the same name."""
        self._by_class = {cls: _error_class(cls) for cls in classes}  # type: ignore[arg-type]  # classes are hashable
        self._by_name = {cls.__name__: error_class for cls, error_class in self._by_class.items()}
        if len(self._by_name) < len(self._by_class):
            names = [cls.__name__ for cls in self._by_class]
            twice = next(name for name in names if names.count(name) > 1)
            raise TypeError(
                f"two declared errors have the name {twice}: rename one, or declare a common base"
            )

    def to_wire(self, error: BaseException) -> tuple[str, dict[str, Any]]:
        """The name and the fields of the declared class that ``error`` travels as; ("", {}) for an undeclared
        error."""
        for base in type(error).__mro__:
            error_class = self._by_class.get(base)
            if error_class is not None and isinstance(error, Exception):
                try:
                    return base.__name__, error_class.fields(error)
                except Exception:  # noqa: BLE001  # the class is a user's; its error arrives as RemoteError
                    break
        return "", {}

    def from_wire(self, error: RemoteError, context: Any) -> Exception:
        """The declared error that ``error`` stands for; ``error`` itself if it is undeclared or its fields are invalid.

        ``context``: given to the validation of fields, as for arguments.
        """
        error_class = self._by_name.get(error.declared)
        if error_class is None:
            return error
        try:
            return error_class.build(error.fields, error.message, context)
        except Exception as problem:  # noqa: BLE001  # the constructor is a user's; the remote error matters more
            error.add_note(f"It is not raised as {error.declared}: {text_of(problem)}")
            return error


NO_ERRORS = DeclaredErrors(())
