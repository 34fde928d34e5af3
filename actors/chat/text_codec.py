"""Text as tokens, and tokens as text: the interface of tokenizers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..messages import Chat
from .answer import Answer, parse_answer


class TextCodec(Protocol):
    """Text as tokens, and tokens as text. ``name``: of the tokenizer."""

    name: str

    def encode(self, text: str, first: bool) -> tuple[int, ...]:
        """The tokens of ``text``; ``first``: it begins the prompt, so special tokens are added."""
        ...

    def decode(self, tokens: tuple[int, ...]) -> str:
        """The text of a completion, without special tokens."""
        ...

    @property
    def is_ready(self) -> bool:
        """False if a conversation has to wait for ``prepare``."""
        return True

    def prepare(self) -> None:
        """Imports what conversations need. Takes seconds: to be called in a thread. Raises ValueError if it can't be
        used."""
        return

    def chat_tokens(
        self, chat: Chat, before: tuple[int, ...], answer: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        """The prompt of a conversation without the tokenizer's template: see ``chat_prompt``; None if that one is to be
        taken. Raises ValueError if it fails, or leaves a message out."""
        return None

    def answer_tokens(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...] | None:
        """The tokens that the model would generate for the last message; None if the template is to be taken. Raises
        ValueError if it fails."""
        return None

    def parse(
        self,
        prompt: tuple[int, ...],
        tokens: tuple[int, ...],
        text: str,
        tools: Sequence[Mapping[str, Any]],
    ) -> Answer:
        """The parts of the answer ``tokens`` to ``prompt``, whose text is ``text``."""
        return parse_answer(text)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation by the tokenizer's chat template, ready for the next answer. Raises ValueError
        if there is no template, and if it fails."""
        ...
