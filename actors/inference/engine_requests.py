"""Translates a turn's request into an engine's, and the engine's result into the turn's answer. Pure."""

import itertools
import json
from typing import Final

from ..chat.answer import Answer, around_arguments
from ..chat.chat_prompt import chat_prompt
from ..chat.text_codec import TextCodec
from ..errors import InvalidRequest
from ..expert_routes import SentRoutes
from ..messages import GenerateRequest, Generation
from ..names import Version
from .engines.engine import AnswerForm, EngineRequest, EngineResult, OnTokens
from .inference_config import EngineConfig
from .stop_search import StopSearch
from .text_stream import TextStream

_THOUGHT: Final = "<think>"
_THOUGHT_TOKENS: Final = 8
"""More than any tokenizer has for the mark and the white space behind it."""


def prompt_tokens(request: GenerateRequest, codec: TextCodec) -> tuple[int, ...]:
    """The tokens of ``request.prompt``, or of its messages. Raises InvalidRequest if the template can't be used."""
    parts = [
        codec.encode(part, number == 0) if isinstance(part, str) else part
        for number, part in enumerate(request.prompt)
    ]
    if request.chat is None or not request.chat.messages:
        return parts[0] if len(parts) == 1 else tuple(itertools.chain.from_iterable(parts))
    before, answer = parts or ((), ())
    return chat_prompt(request.sample_id, request.chat, before, answer, codec)


def stop_search(request: GenerateRequest, codec: TextCodec) -> StopSearch | None:
    """None for a request without stop strings. Raises InvalidRequest for one that is too long to be generated."""
    if not request.stop:
        return None
    for stop in request.stop:
        if (tokens := len(codec.encode(stop, False))) > request.max_new_tokens:
            raise InvalidRequest(
                request.sample_id,
                f"the stop string {stop!r} has {tokens} tokens, max_new_tokens is {request.max_new_tokens}: it can't "
                "be generated",
            )
    return StopSearch(request.stop, codec.decode, request.completion)


def listener(search: StopSearch | None, stream: TextStream | None) -> OnTokens | None:
    """Gives each new token to ``search``, and those of the turn to ``stream``."""
    if search is None:
        return None if stream is None else stream.take

    def take(tokens: tuple[int, ...]) -> bool:
        tokens = search.take(tokens)
        if stream is not None and tokens:
            stream.take(tokens)
        return search.is_found

    return take


def answer_forms(
    request: GenerateRequest, prompt: tuple[int, ...], codec: TextCodec, engine: EngineConfig
) -> tuple[AnswerForm, ...]:
    """The forms that the answer may have by the request's constraint; empty without one.

    Raises InvalidRequest if ``engine`` holds no answer to a form, if the answer has been begun in the prompt, and for
    calls of a model that writes them in another form."""
    constraint, name = request.constraint, request.sample_id
    if constraint is None:
        return ()
    if not engine.constrains:
        raise InvalidRequest(
            name, f"the engine {engine.name} can't hold an answer to JSON or to a call of a tool: vllm can"
        )
    if codec.decode(prompt[-_THOUGHT_TOKENS:]).rstrip().endswith(_THOUGHT):
        raise InvalidRequest(
            name,
            f"the prompt ends with {_THOUGHT}: JSON or a call of a tool would be a part of the reasoning",
        )
    forms = [AnswerForm(constraint.schema)] if constraint.schema else []
    return (*forms, *(_call_form(request, tool, prompt, codec) for tool in constraint.tools))


def _call_form(request: GenerateRequest, tool: str, prompt: tuple[int, ...], codec: TextCodec) -> AnswerForm:
    tools = () if request.chat is None else request.chat.tools
    begin, end = around_arguments(tool)
    example = f"{begin}{{}}{end}"
    calls = codec.parse(prompt, codec.encode(example, False), example, tools).calls
    if [(call.name, call.error) for call in calls] != [(tool, "")]:
        raise InvalidRequest(
            request.sample_id,
            f"a call of {tool} can't be forced: the model does not write calls as {example!r}",
        )
    schemas = {declared["function"]["name"]: declared["function"].get("parameters") for declared in tools}
    return AnswerForm(json.dumps(schemas.get(tool) or {"type": "object"}), begin, end)


def engine_request(
    request: GenerateRequest, prompt: tuple[int, ...], forms: tuple[AnswerForm, ...] = ()
) -> EngineRequest:
    """The engine's request for a turn whose ``request.prompt`` has the tokens ``prompt``.

    Raises InvalidRequest if no engine can serve it.
    """
    resumed_tokens = len(request.completion)
    return EngineRequest(
        request.sample_id,
        prompt + request.completion,
        request.seed,
        request.temperature,
        request.max_new_tokens - resumed_tokens,
        resumed_tokens,
        truncation=request.truncation,
        chat=request.chat,
        stop=request.stop,
        forms=forms,
    )


def keep_result(result: EngineResult, *, resumable: bool) -> EngineResult:
    """The part of a result that a turn keeps: nothing of an interrupted one that its engine can't resume. Such a turn
    begins again."""
    if resumable or result.finish_reason != "interrupted":
        return result
    return result.first(0, result.finish_reason)


def generation_of(
    version: Version,
    request: GenerateRequest,
    prompt: tuple[int, ...],
    result: EngineResult,
    codec: TextCodec,
) -> Generation:
    """The answer to ``request``, generated by ``version``."""
    tokens = request.completion + result.tokens
    text, answer = codec.decode(tokens), None
    if request.chat is not None and result.finish_reason != "interrupted":
        parts = codec.parse(prompt, tokens, text, request.chat.tools)
        if parts != Answer(text):
            answer = parts.with_ids(request.sample_id)
    routes = SentRoutes.of(result.routes)
    return Generation(
        text, prompt, result.tokens, result.logprobs, version, result.finish_reason, answer, routes
    )
