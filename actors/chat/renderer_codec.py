"""The text codec of models whose family the library renderers knows: it makes tokens of messages, and messages of
answers' tokens.

A conversation continues by the library's bridge: the tokens of the last turn and behind them those of the new messages.
So templates that rewrite earlier answers do not matter (Qwen3's leaves their reasoning out): the model reads what it
has written. Parts of an answer begin and end by its tokens, in the form that the family has.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import compress
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from ...core.base.texts import half_problem
from ..messages import Chat
from .answer import Answer, WrittenCall
from .template_messages import template_messages
from .tokenizer_codec import TokenizerCodec

_ERRORS: Final = {
    "invalid_json": "the call is not valid JSON",
    "unclosed_block": "the call has no end",
    "missing_name": "the call names no tool",
    "malformed_structure": "the call has another form than the model's",
}
_SHOWN: Final = 80


class RendererCodec(TokenizerCodec):
    """``family``: the library's name, or ``auto``: the one that the library has for the tokenizer's name. Without one
    this is the tokenizer's own template.

    The library is imported by ``prepare``, or by the first conversation: it takes a second and 30 MB, of which an
    engine without conversations has no use."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, family: str, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(tokenizer, options)
        self._tokenizer, self._family, self._options = tokenizer, family, dict(options or {})
        # The trajectories of a group share their first prompt.
        self._first_tokens = lru_cache(maxsize=256)(self._render_first)

    @property
    def is_ready(self) -> bool:
        return "_renderer" in self.__dict__

    def prepare(self) -> None:
        _ = self._renderer

    @property
    def family(self) -> str | None:
        return None if self._renderer is None else str(self._renderer.config.name)

    @cached_property
    def _renderer(self) -> Any:
        """The library's renderer; None for a model of an unknown family. Raises ValueError for an unknown name of a
        family or of an option, and if the tokenizer lacks the family's special tokens."""
        family: str | None = self._family
        try:
            import renderers

            if family == "auto":
                family = renderers.base.MODEL_RENDERER_MAP.get(self.name)
            if family is None:
                return None
            # Answers keep their reasoning, also before a later question, as the tokens that they are.
            config: Any = type(renderers.config_from_name(family))(thinking_retention="all")
            renderer: Any = renderers.create_renderer(
                self._tokenizer, config, chat_template_kwargs=self._options
            )
        except Exception as error:  # the library's own, and assertions about the tokenizer
            raise ValueError(
                f"renderers can't use the tokenizer {self.name} as {family!r}: {type(error).__name__}: {error}"
            ) from error
        return renderer

    def chat_tokens(
        self, chat: Chat, before: tuple[int, ...], answer: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        if self._renderer is None:
            return None
        if not chat.answered:
            return self._first_tokens(json.dumps([chat.messages, chat.tools]))
        messages = _name_results(template_messages(chat.messages))[chat.answered :]
        rendered = self._call(
            "bridge_to_next_turn", [*before], [*answer], messages, tools=[*chat.tools] or None
        )
        if rendered is None:  # an answer of the workflow's own among the new messages, for example
            return None
        tokens, turn = tuple(rendered.token_ids), before + answer
        if tokens[: len(turn)] != turn:
            return None
        self._refuse_left_out(rendered, messages, chat.answered)
        return tokens

    def _render_first(self, written: str) -> tuple[int, ...]:
        """``written``: messages and tools as JSON."""
        messages, tools = json.loads(written)
        plain = _name_results(template_messages(messages))
        rendered = self._call("render", plain, tools=tools or None, add_generation_prompt=True)
        self._refuse_left_out(rendered, plain, 0)
        return tuple(rendered.token_ids)

    def _refuse_left_out(self, rendered: Any, messages: Sequence[Mapping[str, Any]], first: int) -> None:
        """Raises ValueError if one of ``messages`` has no tokens: the library passes over unknown roles."""
        counts = rendered.tokens_per_message(len(messages))
        for number, (message, count) in enumerate(zip(messages, counts, strict=True), first):
            if not count and message.get("content"):
                raise ValueError(
                    f"the renderer {self.family} leaves out messages[{number}], of the role {message['role']!r}"
                )

    def answer_tokens(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...] | None:
        if self._renderer is None:
            return None
        plain, schemas = _name_results(template_messages(messages)), [*tools] or None
        whole = self._call("render", plain, tools=schemas)
        last = len(plain) - 1
        sampled = [
            is_sampled and index == last
            for is_sampled, index in zip(whole.sampled_mask, whole.message_indices, strict=False)
        ]
        if not any(sampled):
            return None
        # The prompt may have begun the answer, with an empty reasoning for example.
        prompt = self._call("render", plain[:-1], tools=schemas, add_generation_prompt=True).token_ids
        if whole.token_ids[: len(prompt)] == prompt:
            sampled[: len(prompt)] = [False] * len(prompt)
        return tuple(compress(whole.token_ids, sampled))

    def parse(
        self,
        prompt: tuple[int, ...],
        tokens: tuple[int, ...],
        text: str,
        tools: Sequence[Mapping[str, Any]],
    ) -> Answer:
        if self._renderer is None:
            return super().parse(prompt, tokens, text, tools)
        try:
            parsed = self._call("parse_response", [*tokens], tools=[*tools] or None, prompt_ids=[*prompt])
        except ValueError as error:  # a model may write anything
            return Answer(text, calls=(WrittenCall("", error=f"the answer can't be read: {error}"),))
        calls = tuple(map(_written_call, parsed.tool_calls))
        content = [parsed.content]
        for call, attempt in zip(calls, parsed.tool_calls, strict=True):
            if call.error:
                span = attempt.token_span
                content.append(attempt.raw if span is None else self.decode(tokens[slice(*span)]))
        return Answer("\n".join(filter(None, content)), parsed.reasoning_content or "", calls)

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        try:
            return getattr(self._renderer, name)(*arguments, **options)
        except Exception as error:  # the library's own: a template in Python
            raise ValueError(f"the renderer {self.family} failed: {type(error).__name__}: {error}") from error


def _name_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with the names of the tools whose results they are: some families write them, and a bridge does not
    see the calls."""
    names = {
        call.get("id"): call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def _written_call(attempt: Any) -> WrittenCall:
    name, arguments, status = attempt.name, attempt.arguments, str(attempt.status)
    if status in _ERRORS:
        return WrittenCall(
            name if isinstance(name, str) else "", error=f"{_ERRORS[status]}: {attempt.raw:.{_SHOWN}}"
        )
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return WrittenCall(name, error=f"the call is not valid JSON: {error}")
    if not isinstance(name, str) or not isinstance(arguments, dict | None):
        return WrittenCall("", error="the arguments are not a JSON object")
    if problem := half_problem((name, arguments)):
        return WrittenCall("", error=f"the call holds text that can't be read: {problem}")
    return WrittenCall(name, json.dumps(arguments or {}, ensure_ascii=False), id=attempt.id or "")
