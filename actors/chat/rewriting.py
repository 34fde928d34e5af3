"""Probes whether a codec's conversations continue, or are rewritten by its chat template. Pure."""

from typing import Any, Final

from ..errors import InvalidRequest
from ..messages import Chat
from .chat_prompt import chat_prompt
from .text_codec import TextCodec

_QUESTION: Final = {"role": "user", "content": "1 + 1?"}
_NEXT: Final = {"role": "user", "content": "Are you sure?"}
_ANSWERS: Final = {"answers": "2", "answers with reasoning": "<think>\nOne more than 1.\n</think>\n\n2"}


def rewritten_answers(codec: TextCodec, end: int | None) -> str:
    """The answers behind which a conversation does not continue by its tokens: all of them, or those with reasoning;
    empty if all conversations do, or none can begin. ``end``: the token that ends an answer."""
    try:
        prompt = chat_prompt("", Chat((_QUESTION,)), (), (), codec)
    except Exception:  # noqa: BLE001  # the tokenizer's: one of a few words has no token for those of the question
        return ""
    for name, text in _ANSWERS.items():
        message: dict[str, Any] = codec.parse(prompt, codec.encode(text, False), text, ()).message
        tokens = (*codec.encode(text, False), *(() if end is None else (end,)))
        try:
            chat_prompt("", Chat((_QUESTION, message, _NEXT), answered=2), prompt, tokens, codec)
        except InvalidRequest:
            return name
    return ""
