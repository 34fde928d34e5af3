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

from flexmarl.actors.errors import EndpointFailed, EngineFailed, InvalidRequest
from flexmarl.actors.inference.engines.byte_codec import ByteCodec
from flexmarl.actors.inference.engines.engine import EngineRequest
from flexmarl.actors.inference.engines.openai_engine import OpenaiEngine
from flexmarl.actors.inference.inference_config import OpenaiEngineConfig
from flexmarl.actors.messages import Chat, Truncation

from ....openai_endpoint import Endpoint, served_endpoint
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
    engine = engine_of(endpoint.base_url, retries=1, request_timeout_s=0.05)
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
        (replace(PLAIN, chat=Chat(({"role": "user", "content": "x"},), ({"type": "function"},))), "tools"),
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
