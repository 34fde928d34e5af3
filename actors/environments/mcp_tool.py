"""A tool of an MCP server, and the result of a call, for an agent to read."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mcp_types import CallToolResult

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """``text``: for the agent. ``data``: the structured content, for the workflow; empty if the server sends none."""

    text: str
    data: Mapping[str, Any]


class McpTool:
    """One tool of a server: for ``Ask(tools=...)``, ``generate`` and ``run_tools``, as a function is."""

    def __init__(
        self,
        call: Callable[..., Awaitable[ToolResult]],
        name: str,
        description: str,
        parameters: Mapping[str, Any],
    ) -> None:
        """``call``: of its server, with the tool's name and the arguments as keywords. Raises ValueError if
        ``parameters`` are not the JSON schema of an object."""
        import jsonschema.exceptions
        import jsonschema.validators
        import referencing

        if not _NAME.fullmatch(name):
            raise ValueError(f"the name {name[:80]!r} does not match {_NAME.pattern}")
        if parameters.get("type") != "object":
            raise ValueError(f"its parameters are of type {parameters.get('type')!r}: needs 'object'")
        validator = jsonschema.validators.validator_for(parameters, jsonschema.Draft202012Validator)
        try:
            validator.check_schema(parameters)
        except jsonschema.exceptions.SchemaError as error:
            raise ValueError(
                f"its parameters are not a JSON schema: {error.json_path}: {error.message}"
            ) from None
        self._call, self._name = call, name
        function = {"name": name, "description": description, "parameters": dict(parameters)}
        self._schema = {"type": "function", "function": function}
        # Without a registry of its own, a validator would fetch references to other addresses from the internet.
        self._validator: Any = validator(parameters, registry=referencing.Registry())

    @property
    def schema(self) -> dict[str, Any]:
        """In the form of OpenAI's API."""
        return self._schema

    @property
    def name(self) -> str:
        """The tool's name in its server."""
        return self._name

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """``arguments`` as they are. Raises ValueError, which names each that the schema refuses."""
        import referencing.exceptions

        try:
            problems = [
                f"{error.json_path}: {error.message}" for error in self._validator.iter_errors(arguments)
            ]
        except referencing.exceptions.Unresolvable as error:
            raise ValueError(
                f"the schema of {self._name} refers to {error.ref}, which is not in it"
            ) from None
        if problems:
            raise ValueError("; ".join(problems))
        return dict(arguments)

    async def __call__(self, **arguments: Any) -> str:
        """Calls the tool and returns the result's text. Raises ToolFailed, ToolServerLost."""
        return (await self._call(self._name, **arguments)).text


def result_text(result: "CallToolResult") -> str:
    """The blocks of a result for a language model: a text as it is, another block as its type and size."""
    texts = [_block_text(block) for block in result.content]
    if not texts and result.structured_content:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _block_text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource_link":
        return f"[{block.uri}]"
    content = block.resource if block.type == "resource" else block
    if (text := getattr(content, "text", None)) is not None:
        return str(text)
    data: str = getattr(content, "blob", None) or getattr(content, "data", None) or ""
    return f"[{content.mime_type or 'data'}: {len(data) * 3 // 4} bytes]"
