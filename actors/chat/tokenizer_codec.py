"""The text codec of models that have a Hugging Face tokenizer."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from .answer import CALL_BEGIN, CALL_END, with_calls_as_text
from .template_messages import template_messages
from .text_codec import TextCodec


class TokenizerCodec(TextCodec):
    """Encodes and decodes with the backend of ``tokenizer``; it remembers the tokens of the last 256 texts. Of special
    tokens a decoded text has the marks of a tool's call: without them an answer would call nothing."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> None:
        """``options``: arguments of the chat template."""
        backend = tokenizer.backend_tokenizer

        @lru_cache(maxsize=256)  # the trajectories of a group share their first prompt
        def encode(text: str, first: bool) -> tuple[int, ...]:
            return tuple(backend.encode(text, add_special_tokens=first).ids)

        self._encode = encode
        self._backend = backend
        self._left_out = _all_but_marks(backend)
        self._has_template = tokenizer.chat_template is not None
        # A template without the field would leave the calls out.
        has_calls = "tool_calls" in str(tokenizer.chat_template)
        self._plain = template_messages if has_calls else _with_calls_as_text
        template: Any = tokenizer.apply_chat_template  # its types are narrower than templates are
        self._render = partial(template, **(options or {}), add_generation_prompt=True, tokenize=False)
        self.name: str = tokenizer.name_or_path

    def encode(self, text: str, first: bool) -> tuple[int, ...]:
        return self._encode(text, first)

    def decode(self, tokens: tuple[int, ...]) -> str:
        if self._left_out is None:
            text: str = self._backend.decode(tokens, skip_special_tokens=True)
        else:
            kept = [token for token in tokens if token not in self._left_out]
            text = self._backend.decode(kept, skip_special_tokens=False)
        return text

    def chat_text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        if not self._has_template:
            raise ValueError(f"the tokenizer {self.name} has no chat template: give the prompt as text")
        try:
            text: str = self._render(self._plain(messages), tools=[*tools] or None)
        except Exception as error:  # a template is a program of its author's
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template of {self.name} failed: {problem}") from error
        return text


def _with_calls_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [*map(with_calls_as_text, messages)]


def _all_but_marks(backend: Any) -> frozenset[int] | None:
    """The special tokens besides the marks of a call; None if these are ordinary text."""
    special = {
        number: token.content for number, token in backend.get_added_tokens_decoder().items() if token.special
    }
    left_out = frozenset(
        number for number, content in special.items() if content not in (CALL_BEGIN, CALL_END)
    )
    return left_out if len(left_out) < len(special) else None
