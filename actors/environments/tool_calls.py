"""Tools of an agent: their schemas, from plain functions or as they are, and the calls of an answer."""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import ArgsKwargs

_SHOWN: Final = 80

Tool = Callable[..., Awaitable[Any]]
ToolOrSchema = Tool | Mapping[str, Any]
"""A function, or the schema of a tool that the workflow calls by other means, in the form of OpenAI's API:
``{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}``."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of an answer. ``error``: the reason for which it can't be made, for the agent to read; empty if it
    can. ``id``: the name of the call for its result's ``tool_call_id``, which no other call of the run has; empty for
    one that can't be read, and in an answer to a prompt of text."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    id: str = field(default="", compare=False)


@runtime_checkable
class ToolDeclaration(Protocol):
    """A tool's schema and the check of its arguments. A tool of a server has these itself."""

    @property
    def schema(self) -> dict[str, Any]:
        """In the form of OpenAI's API, as ``ToolOrSchema`` shows it."""

    @property
    def name(self) -> str:
        """The name by which an answer calls it."""

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Converts ``arguments``. Raises ValueError, which names each that is wrong."""


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """A tool's ``schema``, and the validator of its arguments. No reference to the tool: see ``declaration_of``."""

    schema: dict[str, Any]
    _arguments: "TypeAdapter[Any]"

    @property
    def name(self) -> str:
        """The name by which an answer calls it: the ``function.name`` of its schema."""
        return str(self.schema["function"]["name"])

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """``arguments`` as the annotations say, with defaults. Raises ValueError, which names each that is wrong."""
        try:
            values: dict[str, Any] = self._arguments.validate_python(ArgsKwargs((), dict(arguments)))
        except ValidationError as error:
            raise ValueError("; ".join(map(_problem, error.errors(include_url=False)))) from None
        return values


def _problem(detail: Any) -> str:
    return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"


_declared: "WeakKeyDictionary[Callable[..., Any], dict[bool, DeclaredTool]]" = WeakKeyDictionary()
"""By function, and whether it is bound. An entry ends with its function: a workflow may make functions of its own."""


def declaration_of(tool: Tool | ToolDeclaration) -> ToolDeclaration:
    """Raises ValueError if ``tool`` is not an ``async def``, or a parameter has no JSON schema."""
    if isinstance(tool, Mapping):
        raise ValueError(
            f"the tool {tool_schema(tool)['function']['name']} is a schema, and has no function to call"
        )
    if isinstance(tool, ToolDeclaration):
        return tool
    is_bound = inspect.ismethod(tool)
    function = tool.__func__ if inspect.ismethod(tool) else tool
    name = getattr(tool, "__name__", repr(tool))
    if not inspect.iscoroutinefunction(tool):
        raise ValueError(f"the tool {name} is not an async function: write `async def {name}`")
    of_function = _declared.setdefault(function, {})
    if is_bound not in of_function:
        of_function[is_bound] = _declare(tool, name)
    return of_function[is_bound]


def _declare(tool: Tool, name: str) -> DeclaredTool:
    try:
        signature = inspect.signature(tool, eval_str=True)
        if any(p.kind is p.POSITIONAL_ONLY for p in signature.parameters.values()):
            raise TypeError("a call names its arguments, and can't give one that is positional-only")
        adapter: TypeAdapter[Any] = TypeAdapter(_stand_in(signature))
        parameters = adapter.json_schema()
    except (PydanticUserError, NameError, TypeError) as error:
        raise ValueError(f"the tool {name} has a parameter without a JSON schema: {error}") from error
    function = {"name": name, "description": inspect.getdoc(tool) or "", "parameters": parameters}
    return DeclaredTool({"type": "function", "function": function}, adapter)


def _stand_in(signature: inspect.Signature) -> Any:
    """A function with this signature that returns its arguments. A validator of the tool itself would keep it alive."""

    def arguments(*args: Any, **keywords: Any) -> dict[str, Any]:
        return {**signature.bind_partial(*args).arguments, **keywords}

    stand_in: Any = arguments
    stand_in.__signature__ = signature
    stand_in.__annotations__ = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.annotation is not parameter.empty
    }
    return stand_in


def tool_schema(tool: ToolOrSchema) -> dict[str, Any]:
    """The schema of a tool in the form that chat templates take. A function's has its name, its docstring, and the JSON
    schema of its annotated parameters. Raises ValueError if it is not an ``async def``, if an annotation has no JSON
    schema, and for a schema of another form."""
    return _checked_schema(tool) if isinstance(tool, Mapping) else declaration_of(tool).schema


def _checked_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy as plain data, with the optional keys, which templates read without asking."""
    function = schema.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if (
        schema.get("type") != "function"
        or not isinstance(function, Mapping)
        or not isinstance(name, str)
        or not name
    ):
        raise ValueError(
            f"the tool {_shorten(schema)} is not a schema: needs {{'type': 'function', 'function': {{'name': ..., "
            "'description': ..., 'parameters': {...}}}"
        )
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise ValueError(
            f"the parameters of the tool {name} are not a JSON schema of an object: {_shorten(parameters)}"
        )
    whole = {**schema, "function": {"description": "", **function, "parameters": parameters}}
    try:
        plain: dict[str, Any] = json.loads(json.dumps(whole, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the schema of the tool {name} is not JSON: {error}") from None
    return plain


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
