"""The tokens of a conversation: a generated answer stays the tokens that it is, only the template's new text is
tokenised. Pure.

    template(messages before the answer)  =  begun        template(all messages)  =  begun + answer + rest

The text before the answer has its tokens already, those of the answer's prompt. A template for which the second line is
false (Qwen3's, for example, drops the reasoning of earlier answers) would show the model another text than the one that
it has read and written: it is refused.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from ..errors import InvalidRequest, TurnsRewritten
from ..messages import Chat
from .text_codec import TextCodec

_SHOWN: Final = 40


def chat_prompt(
    sample_id: str, chat: Chat, before: tuple[int, ...], answer: tuple[int, ...], codec: TextCodec
) -> tuple[int, ...]:
    """``before`` and ``answer``: the tokens of the turn that ``chat.answered`` messages end with. Raises InvalidRequest
    if the template fails or leaves a message out, and TurnsRewritten if it rewrites the messages up to that turn."""
    try:
        if (tokens := codec.chat_tokens(chat, before, answer)) is not None:
            return tokens
        if not chat.answered:
            text = codec.chat_text(chat.messages, chat.tools)
            _refuse_left_out(sample_id, chat, text, codec)
            return codec.encode(text, False)
        *messages, _ = chat.messages[: chat.answered]
        begun = codec.chat_text(messages, chat.tools)
        written = codec.decode(answer)  # with the marks that the message of the answer lacks
        messages += [{"role": "assistant", "content": written}, *chat.messages[chat.answered :]]
        text = codec.chat_text(messages, chat.tools)
    except ValueError as error:
        raise InvalidRequest(sample_id, str(error)) from error
    rest = _rest(sample_id, text, begun, written, codec)
    _refuse_left_out(sample_id, chat, rest, codec)
    return before + answer + _without_end(codec.encode(rest, False), answer, codec)


def _rest(sample_id: str, text: str, begun: str, answer: str, codec: TextCodec) -> str:
    """The text behind the answer. A template may strip the answer's white space: the tokens keep it."""
    for written in (begun + answer, begun + answer.strip()):
        if text.startswith(written):
            return text[len(written) :]
    expected = begun + answer
    same = _equal_characters(text, expected)
    raise TurnsRewritten(
        sample_id,
        f"the chat template of {codec.name} rewrites earlier turns: {_excerpt(expected, same)} becomes "
        f"{_excerpt(text, same)}; generate(..., retokenize=True) accepts that and tokenises the messages again",
    )


def _equal_characters(first: str, second: str) -> int:
    """The number of characters that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


def _excerpt(text: str, position: int) -> str:
    start = max(0, position - _SHOWN // 2)
    return repr(text[start : start + _SHOWN])


def _without_end(rest: tuple[int, ...], answer: tuple[int, ...], codec: TextCodec) -> tuple[int, ...]:
    """``rest`` without the token that ends an answer if the answer has generated it itself."""
    generated_end = rest[:1] == answer[-1:] and rest and not codec.decode(rest[:1])
    return rest[1:] if generated_end else rest


def _refuse_left_out(sample_id: str, chat: Chat, text: str, codec: TextCodec) -> None:
    """Raises InvalidRequest if a new message is not in ``text``. Answers that the workflow writes itself may be
    changed: reasoning is often left out."""
    for number, message in enumerate(chat.messages[chat.answered :], chat.answered):
        if message["role"] != "assistant" and not _contains(text, message):
            raise InvalidRequest(
                sample_id,
                f"the chat template of {codec.name} leaves out or rewrites messages[{number}], of the role "
                f"{message['role']!r}: {_excerpt(message['content'], 0)}",
            )


def _contains(text: str, message: Mapping[str, Any]) -> bool:
    content = (message.get("content") or "").strip()
    return content in text or json.dumps(content)[1:-1] in text
