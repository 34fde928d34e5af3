"""The engine of endpoints, against a real HTTP server."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.responses import JSONResponse, PlainTextResponse

from flexmarl.actors.chat.answer import parse_answer
from flexmarl.actors.chat.byte_codec import ByteCodec
from flexmarl.actors.environments.tool_calls import ToolCall
from flexmarl.actors.errors import EndpointFailed, EngineFailed, InvalidRequest
from flexmarl.actors.inference.engines.engine import EngineRequest
from flexmarl.actors.inference.engines.openai_engine import OpenaiEngine
from flexmarl.actors.inference.inference_config import OpenaiEngineConfig
from flexmarl.actors.messages import Chat, Truncation

from ....openai_endpoint import Endpoint, served_endpoint, streamed
from ....patience import PATIENCE_S


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with served_endpoint() as endpoint:
        yield endpoint


class Pauses(list[float]):
    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


def engine_of(base_url: str, pauses: Pauses | None = None, **options: Any) -> OpenaiEngine:
    config = OpenaiEngineConfig(base_url=base_url, model="large", **options)
    return OpenaiEngine(config, ByteCodec("bytes"), pauses if pauses is not None else Pauses())


PLAIN = EngineRequest("a", tuple("abc é".encode()), 2**40 + 7, 0.5, 16)
ASKED = {"model": "large", "temperature": 0.5, "max_tokens": 16, "seed": 7}


async def test_a_plain_prompt_goes_there_as_text_and_its_answer_comes_back_as_bytes(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret\n")
    engine = engine_of(endpoint.base_url, api_key_file=tmp_path / "key")
    result = await engine.generate(replace(PLAIN, truncation=Truncation(top_p=0.9), stop=("X", "Y")))
    assert bytes(result.tokens).decode() == "é cba" and result.finish_reason == "stop"
    assert result.logprobs == (), "the endpoint's tokens are unknown"
    more = {"prompt": "abc é", "top_p": 0.9, "stop": ["X", "Y"]}
    assert endpoint.requests == [("/v1/completions", ASKED | more, "Bearer secret")]
    assert engine.statistics().generated_tokens == 6
    await engine.close()


async def test_messages_go_there_as_they_are(endpoint: Endpoint) -> None:
    engine = engine_of(endpoint.base_url)
    messages = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "0123456789"})
    result = await engine.generate(replace(PLAIN, max_new_tokens=4, chat=Chat(messages)))
    assert bytes(result.tokens) == b"9876" and result.finish_reason == "length"
    assert endpoint.requests == [
        ("/v1/chat/completions", ASKED | {"max_tokens": 4, "messages": [*messages]}, None)
    ]
    await engine.close()


async def test_an_endpoint_that_refuses_max_tokens_is_asked_with_the_key_that_it_names(
    endpoint: Endpoint,
) -> None:
    refusal = {"error": {"message": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens'."}}
    answer = {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}
    endpoint.answers = [JSONResponse(refusal, 400), JSONResponse(answer), JSONResponse(answer)]
    engine = engine_of(endpoint.base_url)
    asked = replace(PLAIN, chat=Chat(({"role": "user", "content": "is it?"},)))
    for name in ("a", "b"):
        assert bytes((await engine.generate(replace(asked, request_id=name))).tokens) == b"yes"
    keys = [{key: body[key] for key in body if key.startswith("max")} for _, body, _ in endpoint.requests]
    assert keys == [{"max_tokens": 16}, {"max_completion_tokens": 16}, {"max_completion_tokens": 16}]
    await engine.generate(PLAIN)
    assert endpoint.requests[-1][1]["max_tokens"] == 16, "plain prompts have no other key"
    await engine.close()


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_a_busy_endpoint_is_asked_again(endpoint: Endpoint, status: int) -> None:
    endpoint.answers = [PlainTextResponse("busy", status)] * 2
    engine = engine_of(endpoint.base_url, pauses := Pauses())
    assert (await engine.generate(PLAIN)).finish_reason == "stop"
    assert len(endpoint.requests) == 3 and pauses == [0.5, 1.0]
    await engine.close()


async def test_retries_are_bounded(endpoint: Endpoint) -> None:
    endpoint.answers = [PlainTextResponse("busy", 503)] * 9
    engine = engine_of(endpoint.base_url, pauses := Pauses(), retries=8)
    with pytest.raises(
        EndpointFailed, match=r"http://127.*/v1/completions: 9 attempts.*with status 503: busy"
    ):
        await engine.generate(PLAIN)
    assert len(endpoint.requests) == 9 and pauses == [0.5, 1, 2, 4, 8, 16, 30, 30]
    await engine.close()


async def test_an_endpoint_that_is_down_is_named() -> None:
    engine = engine_of("http://127.0.0.1:9/v1", retries=1)
    with pytest.raises(
        EndpointFailed, match=r"http://127\.0\.0\.1:9/v1/completions: 2 attempts.*ConnectError"
    ):
        await engine.generate(PLAIN)
    await engine.close()


async def test_a_silent_endpoint_is_given_up(endpoint: Endpoint) -> None:
    endpoint.held = threading.Event()
    engine = engine_of(endpoint.base_url, retries=1, request_timeout_s=1.0)
    with pytest.raises(EndpointFailed, match=r"2 attempts have failed, the last with ReadTimeout"):
        await engine.generate(PLAIN)
    await engine.close()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (PlainTextResponse("no such model", 404), "status 404: no such model"),
        (PlainTextResponse("hello"), "not JSON: hello"),
        (JSONResponse({"choices": []}), "has no text"),
        (JSONResponse([1]), "has no text"),
        (
            JSONResponse({"choices": [{"message": {"content": None}, "finish_reason": "tool_calls"}]}),
            "finish_reason is 'tool_calls'",
        ),
        (
            JSONResponse({"choices": [{"text": "half", "finish_reason": "content_filter"}]}),
            "finish_reason is 'content_filter'",
        ),
    ],
)
async def test_an_answer_without_text_is_not_asked_for_again(
    endpoint: Endpoint, answer: Any, problem: str
) -> None:
    endpoint.answers = [answer]
    engine = engine_of(endpoint.base_url)
    with pytest.raises(EndpointFailed, match=problem):
        await engine.generate(PLAIN)
    assert len(endpoint.requests) == 1
    await engine.close()


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (replace(PLAIN, truncation=Truncation(top_k=5)), "top_k"),
        (replace(PLAIN, truncation=Truncation(min_p=0.1)), "min_p"),
    ],
)
async def test_options_that_the_api_lacks_are_refused(
    endpoint: Endpoint, request_: EngineRequest, problem: str
) -> None:
    engine = engine_of(endpoint.base_url)
    with pytest.raises(InvalidRequest, match=problem):
        await engine.generate(request_)
    assert endpoint.requests == []
    await engine.close()


# --------------------------------------------------------------------------- tools


ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
CALLS = """Let me see.
<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {"a": "x}}
</tool_call>"""
QUESTION = {"role": "user", "content": "1 + 2?"}


def call_field(name: str, arguments: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}


async def test_calls_of_tools_come_as_fields_and_are_text_for_the_workflow(endpoint: Endpoint) -> None:
    calls = [call_field("7", '{"a": 1, "b": 2}'), call_field("8", '{"a": "x}')]
    message = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    endpoint.answers = [JSONResponse({"choices": [{"message": message, "finish_reason": "tool_calls"}]})]
    engine = engine_of(endpoint.base_url)
    result = await engine.generate(replace(PLAIN, chat=Chat((QUESTION,), (ADD,))))
    text = bytes(result.tokens).decode()
    assert text == CALLS and result.finish_reason == "stop"
    first, second = parse_answer(text).tool_calls(["add"])
    assert (first.name, first.arguments, first.error) == ("add", {"a": 1, "b": 2}, "")
    assert "not valid JSON" in second.error
    assert endpoint.requests[0][1] == ASKED | {"messages": [QUESTION], "tools": [ADD]}
    await engine.close()


async def test_calls_in_the_conversation_go_back_as_fields_with_their_results(endpoint: Endpoint) -> None:
    conversation = (
        QUESTION,
        {"role": "assistant", "content": CALLS},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "no such number"},
        {"role": "assistant", "content": "It is 3.<tool_call>"},
        {"role": "user", "content": "Sure?"},
    )
    engine = engine_of(endpoint.base_url)
    await engine.generate(replace(PLAIN, chat=Chat(conversation, (ADD,))))
    _, body, _ = endpoint.requests[0]
    asked, answer, *results, final, last = body["messages"]
    assert (asked, final, last) == (QUESTION, conversation[4], conversation[5])
    assert answer["content"] == "Let me see.\n"
    assert answer["tool_calls"][0] == call_field("call_1_0", '{"a": 1, "b": 2}')
    assert answer["tool_calls"][1]["function"] == {"name": "invalid", "arguments": "{}"}
    assert [(one["content"], one["tool_call_id"]) for one in results] == [
        ("3", "call_1_0"),
        ("no such number", "call_1_1"),
    ]
    await engine.close()


async def test_the_calls_of_a_turn_go_back_with_as_many_results_as_there_are(endpoint: Endpoint) -> None:
    call = call_field("abcdefghi", '{"a": 1}')
    turn = {"role": "assistant", "content": "So.\n<tool_call>{</tool_call>", "tool_calls": [call]}
    conversation = (
        QUESTION,
        turn,
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"},
        {"role": "tool", "content": "error: torn"},
        {**turn, "content": ""},
        {"role": "user", "content": "Sure?"},
    )
    engine = engine_of(endpoint.base_url)
    await engine.generate(replace(PLAIN, chat=Chat(conversation, (ADD,))))
    _, body, _ = endpoint.requests[0]
    _, answer, first, second, without_results, _ = body["messages"]
    named, torn = answer["tool_calls"]
    assert answer["content"] == "So.\n" and named == call
    assert torn["function"] == {"name": "invalid", "arguments": "{}"}
    assert [one["tool_call_id"] for one in (first, second)] == ["abcdefghi", torn["id"]]
    assert "tool_calls" not in without_results
    assert parse_answer(without_results["content"]).tool_calls(["add"]) == (ToolCall("add", {"a": 1}),)
    await engine.close()


# --------------------------------------------------------------------------- streams


@pytest.mark.parametrize("chat", [None, Chat(({"role": "user", "content": "abc é"},))])
async def test_the_text_comes_in_parts_to_those_who_listen(endpoint: Endpoint, chat: Chat | None) -> None:
    engine = engine_of(endpoint.base_url)
    parts: list[bytes] = []
    result = await engine.generate(replace(PLAIN, chat=chat), lambda tokens: parts.append(bytes(tokens)))
    assert [part.decode() for part in parts] == ["é", " ", "c", "b", "a"]
    assert bytes(result.tokens).decode() == "é cba" and result.finish_reason == "stop"
    assert endpoint.requests[0][1]["stream"] is True
    assert result.phases is not None and result.phases.queue_s >= 0 and result.phases.prefill_s > 0
    whole = await engine.generate(replace(PLAIN, chat=chat))
    assert whole.phases is None, "an answer that comes at once does not say when its first token was there"
    await engine.close()


async def test_a_listener_ends_the_stream(endpoint: Endpoint) -> None:
    engine = engine_of(endpoint.base_url)
    parts: list[bytes] = []

    def heard(tokens: tuple[int, ...]) -> bool:
        parts.append(bytes(tokens))
        return len(parts) == 2

    result = await engine.generate(PLAIN, heard)
    assert result.finish_reason == "interrupted" and len(parts) == 2
    await engine.close()


async def test_streamed_calls_are_put_together(endpoint: Endpoint) -> None:
    endpoint.answers = [
        streamed(
            {"delta": {"role": "assistant", "content": "Let me "}},
            {"delta": {"content": "see."}},
            {"delta": {"tool_calls": [{"index": 0, "function": {"name": "add", "arguments": '{"a": 1,'}}]}},
            {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ' "b": 2}'}}]}},
            {"delta": {"tool_calls": [{"index": 1, "function": {"name": "add", "arguments": '{"a": "x}'}}]}},
            reason="tool_calls",
        )
    ]
    engine = engine_of(endpoint.base_url)
    parts: list[bytes] = []
    asked = replace(PLAIN, chat=Chat((QUESTION,), (ADD,)))
    result = await engine.generate(asked, lambda tokens: parts.append(bytes(tokens)))
    assert bytes(result.tokens).decode() == CALLS and b"".join(parts) == b"Let me see."
    await engine.close()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (streamed({"text": "half"}, reason=None), "finish_reason is None"),
        (PlainTextResponse("data: {\n\n", media_type="text/event-stream"), "its stream is invalid"),
        (PlainTextResponse('data: {"choices": [3]}\n', media_type="text/event-stream"), "unknown event"),
        (PlainTextResponse('data: {"error": "too busy"}\n', media_type="text/event-stream"), "too busy"),
    ],
)
async def test_a_broken_stream_is_named(endpoint: Endpoint, answer: Any, problem: str) -> None:
    endpoint.answers = [answer]
    engine = engine_of(endpoint.base_url)
    with pytest.raises(EndpointFailed, match=problem):
        await engine.generate(PLAIN, lambda tokens: None)
    await engine.close()


async def test_an_endpoint_that_does_not_stream_and_one_that_is_busy_first(endpoint: Endpoint) -> None:
    at_once = JSONResponse({"choices": [{"text": "all", "finish_reason": "stop"}]})
    endpoint.answers = [at_once, PlainTextResponse("busy", 503)]
    engine = engine_of(endpoint.base_url)
    parts: list[tuple[int, ...]] = []
    for text in ("all", "é cba"):
        result = await engine.generate(PLAIN, parts.append)
        assert bytes(result.tokens).decode() == text
    assert parts == [], "the second attempt comes at once"
    await engine.close()


# --------------------------------------------------------------------------- many


async def test_at_most_a_batch_is_at_the_endpoint_and_all_can_be_interrupted(endpoint: Endpoint) -> None:
    endpoint.held = threading.Event()
    engine = engine_of(endpoint.base_url, max_batch=2)
    turns = [asyncio.create_task(engine.generate(replace(PLAIN, request_id=str(n)))) for n in range(3)]
    async with asyncio.timeout(PATIENCE_S):
        while len(endpoint.requests) < 2:
            await asyncio.sleep(0.01)
    assert (engine.statistics().running, engine.statistics().waiting) == (2, 1)
    await engine.interrupt()
    results = await asyncio.gather(*turns)
    assert [(result.finish_reason, result.tokens) for result in results] == [("interrupted", ())] * 3
    assert len(endpoint.requests) == 2 and engine.statistics().interrupted == 3
    left = asyncio.create_task(engine.generate(PLAIN))
    async with asyncio.timeout(PATIENCE_S):
        while len(endpoint.requests) < 3:
            await asyncio.sleep(0.01)
    await engine.close()
    with pytest.raises(EngineFailed):
        await left


def test_its_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="must begin with http"):
        OpenaiEngineConfig(base_url="localhost:8000", model="m")
    with pytest.raises(ValidationError, match="its own limit"):
        OpenaiEngineConfig(base_url="http://x/v1", model="m", max_context=10)
    with pytest.raises(ValidationError, match="absolute path"):
        OpenaiEngineConfig(base_url="http://x/v1", model="m", api_key_file=Path("key"))
    config = OpenaiEngineConfig(base_url="http://x/v1", model="m", api_key_file=tmp_path / "key")
    assert "there is no such file" in str(config.unavailable("cpu"))
    (tmp_path / "key").write_text("secret")
    assert config.unavailable("cpu") is None
