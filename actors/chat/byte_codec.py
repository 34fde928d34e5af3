"""The text codec of engines without a tokenizer: the tokens of a text are its bytes in UTF-8."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .answer import with_calls_as_text
from .text_codec import TextCodec

END_OF_SEQUENCE: Final = 0


class ByteCodec(TextCodec):
    """Takes no notice of ``first``: there are no special tokens. ``decode`` raises ValueError for tokens that are not
    UTF-8."""

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, text: str, first: bool) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, tokens: tuple[int, ...]) -> str:
        return bytes(token for token in tokens if token != END_OF_SEQUENCE).decode()

    def chat_text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        lines = [f"tool: {json.dumps(tool)}" for tool in tools]
        plain = map(with_calls_as_text, messages)
        lines += [f"{message['role']}: {message.get('content') or ''}" for message in plain]
        return "\n".join([*lines, "assistant: "])
