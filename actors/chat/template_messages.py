"""Messages of OpenAI's form as chat templates take them. Pure."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with the arguments of calls as objects: OpenAI's API has them as JSON, which most templates would
    write as a string."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    with suppress(ValueError, TypeError, RecursionError):  # an object already, or what a client has made up
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}
