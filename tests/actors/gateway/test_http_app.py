"""Requests and answers of each API on the wire."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import httpx2
import pytest

from flexmarl.actors.errors import InvalidRequest
from flexmarl.actors.gateway import http_app, http_request
from flexmarl.actors.gateway.gateway import Gateway
from flexmarl.actors.gateway.trajectory_programs import ProgramSampling

from ...patience import PATIENCE_S
from .clients import QUESTION, RESULT, scripted
from .scripted_agents import TOOL, ScriptedAgent

CHAT: dict[str, Any] = {"model": "solver", "messages": [{"role": "user", "content": QUESTION}]}
RESPONSES: dict[str, Any] = {"model": "solver", "input": QUESTION}
TEXT: dict[str, Any] = {"model": "solver", "prompt": QUESTION}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": CHAT,
    "completions": TEXT,
    "responses": RESPONSES,
    "messages": CHAT,
}
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@asynccontextmanager
async def connected(
    *answers: str | Exception,
) -> AsyncIterator[tuple[httpx2.AsyncClient, Gateway, ScriptedAgent]]:
    async with scripted(*answers) as (gateway, solver):
        headers = {"Authorization": f"Bearer {gateway.key}"}
        async with httpx2.AsyncClient(base_url=f"{gateway.url}/v1/", headers=headers, timeout=60) as client:
            yield client, gateway, solver


def problem(reply: httpx2.Response) -> str:
    return str(reply.json()["error"]["message"])


@pytest.mark.parametrize("path", BODIES)
async def test_each_api_answers(path: str) -> None:
    async with connected(RESULT, RESULT) as (client, gateway, _):
        whole = await client.post(path, json=BODIES[path])
        assert whole.status_code == 200
        assert RESULT in whole.text
        parts = await client.post(path, json={**BODIES[path], "stream": True})
        assert parts.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in parts.text.splitlines() if line.startswith("data: {")]
        assert len(events) >= 3
        assert dict(gateway.counts) == {"begun": 2}


@pytest.mark.parametrize("path", BODIES)
async def test_the_key_names_the_session_without_one_in_the_url(path: str) -> None:
    async with scripted(RESULT) as (gateway, _):
        url = f"{gateway.url.partition('/sessions/')[0]}/v1/{path}"
        async with httpx2.AsyncClient() as client:
            reply = await client.post(url, json=BODIES[path], headers={"x-api-key": gateway.key})
            assert reply.status_code == 200
            reply = await client.post(url, json=BODIES[path], headers={"x-api-key": "another"})
            assert reply.status_code == 401


@pytest.mark.parametrize(
    ("path", "change", "reason"),
    [
        ("chat/completions", {"messages": []}, "no messages"),
        ("chat/completions", {"messages": [{"content": "hi"}]}, "no role"),
        ("chat/completions", {"messages": [*CHAT["messages"], {"role": "assistant", "content": "It"}]}, "begins its"),
        ("chat/completions", {"response_format": {"type": "xml"}}, "'xml', needs text, json_object"),
        ("chat/completions", {"response_format": {"type": "json_schema"}}, "no schema"),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "always"}, "required, or the name"),
        ("chat/completions", {"tools": [TOOL], "tool_choice": {"type": "function"}}, "required, or the name"),
        ("chat/completions", {"tools": [{"type": "function"}]}, "not a schema"),
        ("chat/completions", {"n": 100}, "needs 1 to"),
        ("chat/completions", {"logit_bias": {"1": 2}}, "no engine"),
        ("chat/completions", {"frequency_penalty": 0.5}, "no engine"),
        ("chat/completions", {"functions": [{}]}, "pass tools"),
        ("completions", {"echo": True}, "no tokens of its prompt"),
        ("completions", {"suffix": "end"}, "forward"),
        ("completions", {"prompt": ["a", "b"]}, "a request for each"),
        ("completions", {"prompt": [1, 2]}, "needs text"),
        ("completions", {"prompt": ""}, "empty"),
        ("responses", {"input": 3}, "needs a string"),
        ("responses", {"input": [{"type": "computer_call"}]}, "computer_call"),
        ("responses", {"tools": [{"type": "web_search"}]}, "web_search"),
        ("responses", {"text": {"format": {"type": "json_schema"}}}, "no schema"),
        ("responses", {"tool_choice": {"type": "allowed_tools"}}, "required, or the name"),
        ("responses", {"previous_response_id": "resp_x"}, "no response 'resp_x'"),
        ("messages", {"tools": [{"type": "web_search_20250305", "name": "web"}]}, "input_schema"),
        ("messages", {"tool_choice": {"type": "tool"}}, "tool with its name"),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "no schema"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ("messages", {"messages": [{"role": "robot", "content": "hi"}]}, "'robot'"),
        ("messages", {"messages": 3}, "needs a list"),
    ],
)  # fmt: skip
async def test_what_can_not_be_done_is_refused_with_the_reason(
    path: str, change: dict[str, Any], reason: str
) -> None:
    async with connected() as (client, gateway, solver):
        reply = await client.post(path, json={**BODIES[path], **change})
        assert reply.status_code == 400
        assert reason in problem(reply)
        assert reply.headers["x-should-retry"] == "false"
        assert (solver.prompts, gateway.turns) == ([], ())


@pytest.mark.parametrize("path", BODIES)
async def test_what_does_no_harm_is_accepted(path: str) -> None:
    harmless = {
        "metadata": {"user_id": "me"}, "user": "me", "service_tier": "auto", "store": True,
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "reasoning": {"effort": "low"}, "n": 1,
        "frequency_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}, "prompt_cache_key": "k",
        "parallel_tool_calls": False,
    }  # fmt: skip
    async with connected(RESULT) as (client, _, _):
        assert (await client.post(path, json={**BODIES[path], **harmless})).status_code == 200


SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}}
ADD: dict[str, Any] = TOOL["function"]  # type: ignore[assignment]  # the other key is text
FLAT_TOOL = {"type": "function", **ADD}
ANTHROPIC_TOOL = {"name": "add", "input_schema": ADD["parameters"]}


@pytest.mark.parametrize(
    ("path", "change", "options"),
    [
        ("chat/completions", {"response_format": {"type": "json_object"}}, {"schema": {"type": "object"}}),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}},
            {"schema": SCHEMA},
        ),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "required"}, {"must_call": True}),
        (
            "chat/completions",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
            {"must_call": "add"},
        ),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "none"}, {}),
        ("responses", {"text": {"format": {"type": "json_object"}}}, {"schema": {"type": "object"}}),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA}}},
            {"schema": SCHEMA},
        ),
        ("responses", {"tools": [FLAT_TOOL], "tool_choice": "required"}, {"must_call": True}),
        (
            "responses",
            {"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "add"}},
            {"must_call": "add"},
        ),
        ("responses", {"tools": [FLAT_TOOL], "tool_choice": "none"}, {}),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"schema": SCHEMA},
        ),
        ("messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}, {"schema": SCHEMA}),
        ("messages", {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}}, {"must_call": True}),
        (
            "messages",
            {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "add"}},
            {"must_call": "add"},
        ),
        ("messages", {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "none"}}, {}),
    ],
)
async def test_a_form_that_each_api_asks_for_is_the_turn_s(
    path: str, change: dict[str, Any], options: dict[str, Any]
) -> None:
    async with connected(RESULT) as (client, _, solver):
        assert (await client.post(path, json={**BODIES[path], **change})).status_code == 200
        (asked,) = solver.options
        assert {key: asked[key] for key in ("schema", "must_call") if key in asked} == options


async def test_a_response_says_the_form_and_the_choice_that_it_was_asked_for() -> None:
    form = {"type": "json_schema", "name": "sum", "schema": SCHEMA}
    async with connected(RESULT, RESULT) as (client, _, _):
        asked = {**RESPONSES, "text": {"format": form}, "tools": [FLAT_TOOL], "tool_choice": "required"}
        reply = (await client.post("responses", json=asked)).json()
        assert (reply["text"]["format"], reply["tool_choice"]) == (form, "required")
        reply = (await client.post("responses", json=RESPONSES)).json()
        assert (reply["text"]["format"], reply["tool_choice"]) == ({"type": "text"}, "none")


async def test_an_engine_that_holds_no_answer_to_a_form_refuses_it_by_name() -> None:
    reason = "the engine embedded can't hold an answer to JSON or to a call of a tool: vllm can"
    async with connected(InvalidRequest("1:q_0_0", reason)) as (client, gateway, _):
        asked = {**CHAT, "response_format": {"type": "json_object"}, "stream": True}
        reply = await client.post("chat/completions", json=asked)
        assert (reply.status_code, problem(reply), gateway.turns) == (400, reason, ())


async def test_options_of_each_api_are_those_of_a_turn() -> None:
    options = {"temperature": 0.5, "top_p": 0.9}
    async with connected(RESULT, RESULT, RESULT, RESULT) as (client, _, solver):
        await client.post("chat/completions", json={**CHAT, **options, "max_completion_tokens": 7, "seed": 3})
        await client.post("completions", json={**TEXT, **options, "max_tokens": 7, "stop": "3"})
        await client.post("responses", json={**RESPONSES, **options, "max_output_tokens": 7})
        await client.post("messages", json={**CHAT, **options, "max_tokens": 7, "stop_sequences": ["3"]})
        common = {**options, "max_new_tokens": 7}
        assert solver.options == [
            {**common, "seed": 3},
            {**common, "stop": "3"},
            common,
            {**common, "stop": ["3"]},
        ]


async def test_a_program_gets_no_more_tokens_than_its_agent_may_write() -> None:
    async with connected(RESULT, RESULT) as (client, gateway, solver):
        gateway._session.programs.sampling = {"solver": ProgramSampling(64, is_training=True)}
        await client.post("messages", json={**CHAT, "max_tokens": 32000})
        await client.post("messages", json={**CHAT, "max_tokens": 32})
        assert [options["max_new_tokens"] for options in solver.options] == [64, 32]


async def test_several_choices_and_logprobs() -> None:
    async with connected("3", "4") as (client, gateway, _):
        reply = await client.post("chat/completions", json={**CHAT, "n": 2, "logprobs": True})
        choices = reply.json()["choices"]
        assert [choice["message"]["content"] for choice in choices] == ["3", "4"]
        assert choices[0]["logprobs"]["content"][0]["logprob"] == -0.5
        assert len(gateway.turns) == 2


async def test_a_response_continues_an_earlier_one() -> None:
    async with connected(RESULT, RESULT, RESULT) as (client, gateway, _):
        body = {**RESPONSES, "instructions": "Be brief."}
        first = (await client.post("responses", json=body)).json()
        second = await client.post(
            "responses", json={**body, "input": "Sure?", "previous_response_id": first["id"]}
        )
        assert second.json()["previous_response_id"] == first["id"]
        third = await client.post(
            "responses", json={**body, "store": False, "previous_response_id": second.json()["id"]}
        )
        assert dict(gateway.counts) == {"begun": 1, "merged": 2}
        reply = await client.post("responses", json={**body, "previous_response_id": third.json()["id"]})
        assert "was not stored" in problem(reply)


async def test_a_text_continues_the_text_that_it_begins_with() -> None:
    async with connected("3", "5", "6", "7") as (client, gateway, solver):
        for prompt in (QUESTION, f"{QUESTION}3 and 2?", f"{QUESTION}3 and 3?", "another"):
            assert (await client.post("completions", json={**TEXT, "prompt": prompt})).status_code == 200
        assert dict(gateway.counts) == {"begun": 2, "merged": 1, "branched": 1}
        assert solver.prompts[1] == [gateway.turns[0], " and 2?"]


ANSWERED: dict[str, tuple[str, list[Any]]] = {
    "chat/completions": ("messages", [{"role": "assistant", "content": "3", "reasoning_content": "I add."}]),
    "responses": (
        "input",
        [
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I add."}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "3"}]},
        ],
    ),
    "messages": (
        "messages",
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I add.", "signature": ""},
                    {"type": "text", "text": "3"},
                ],
            }
        ],
    ),
}


@pytest.mark.parametrize("path", ANSWERED)
async def test_an_answer_keeps_its_reasoning_where_it_comes_from_another_session(path: str) -> None:
    """A chat template may have a place for it."""
    key, answer = ANSWERED[path]
    question, more = ({"role": "user", "content": text} for text in (QUESTION, "Sure?"))
    async with connected(RESULT) as (client, _, solver):
        reply = await client.post(path, json={"model": "solver", key: [question, *answer, more]})
        assert reply.status_code == 200
        message = {"role": "assistant", "content": "3", "reasoning_content": "I add."}
        assert solver.prompts == [[question, message, more]]


@pytest.mark.parametrize("sends_reasoning", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ANSWERED)
async def test_an_answer_with_reasoning_is_continued_with_and_without_it(
    path: str, stream: bool, sends_reasoning: bool
) -> None:
    """The two kinds of text come as events of their own in a stream."""
    key, answer = ANSWERED[path]
    question, more = ({"role": "user", "content": text} for text in (QUESTION, "Sure?"))
    if not sends_reasoning:
        answer = [{"role": "assistant", "content": "3"}]
    async with connected("<think>I add.</think>3", RESULT) as (client, gateway, _):
        body = {"model": "solver", "stream": stream}
        reply = await client.post(path, json={**body, key: [question]})
        assert "I add." in reply.text or stream
        await client.post(path, json={**body, key: [question, *answer, more]})
        assert dict(gateway.counts) == {"begun": 1, "merged": 1}


async def test_a_harness_that_marks_each_request_continues_its_conversation() -> None:
    async with connected(RESULT, RESULT) as (client, gateway, _):
        messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
        for number in range(2):
            mark = {"type": "text", "text": f"x-anthropic-billing-header: cch={number}"}
            system = [mark, {"type": "text", "text": "Be brief."}]
            reply = await client.post("messages", json={**CHAT, "system": system, "messages": messages})
            answer = {"role": "assistant", "content": reply.json()["content"]}
            messages += [answer, {"role": "user", "content": "Sure?"}]
        assert dict(gateway.counts) == {"begun": 1, "merged": 1}


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_is_told_in_the_form_of_the_api(path: str) -> None:
    async with connected(RuntimeError("lost"), RuntimeError("lost")) as (client, gateway, _):
        for stream in (False, True):
            reply = await client.post(path, json={**BODIES[path], "stream": stream})
            assert reply.status_code == 500
            assert "lost" in problem(reply)
            assert ("type" in reply.json()) == (path == "messages")
        assert gateway.turns == ()


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_in_mid_stream_is_the_last_event(path: str) -> None:
    async with connected(RESULT) as (client, gateway, solver):
        solver.held = asyncio.Event()
        async with client.stream("POST", path, json={**BODIES[path], "stream": True}) as reply:
            lines = reply.aiter_lines()
            shown = [await anext(lines)]
            solver.failure = RuntimeError("lost")
            solver.held.set()
            shown += [line async for line in lines]
        text = "\n".join(shown)
        assert "lost" in text
        assert "[DONE]" not in text
        assert gateway.turns == ()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_program_that_goes_cancels_its_turn(path: str, stream: bool) -> None:
    async with connected(RESULT) as (client, gateway, solver):
        solver.held = asyncio.Event()
        request = asyncio.create_task(client.post(path, json={**BODIES[path], "stream": stream}))
        while not solver.prompts:
            await asyncio.sleep(0.005)
        request.cancel()
        while not solver.cancelled:
            await asyncio.sleep(0.005)
        assert gateway.turns == ()


async def test_text_comes_before_the_turn_has_ended() -> None:
    async with connected(RESULT) as (client, gateway, solver):
        solver.held = asyncio.Event()
        body = {**CHAT, "stream": True}
        async with client.stream("POST", "chat/completions", json=body) as reply:
            text = ""
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                if text == RESULT and not solver.held.is_set():
                    assert gateway.turns == ()
                    solver.held.set()
        assert len(gateway.turns) == 1


async def test_unknown_paths_and_methods_are_refused_in_the_form_of_the_api() -> None:
    async with connected() as (client, _, _):
        reply = await client.post("embeddings", json={})
        assert reply.status_code == 404
        assert "/v1/messages" in problem(reply)
        assert (await client.get("/nowhere", headers=ANTHROPIC)).json()["type"] == "error"
        reply = await client.get("chat/completions")
        assert (reply.status_code, "POST" in problem(reply)) == (405, True)
        reply = await client.post("messages/count_tokens", json=CHAT, headers=ANTHROPIC)
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
        assert (await client.post("models")).status_code == 405


async def test_models_are_listed_in_both_forms() -> None:
    async with connected() as (client, _, _):
        listed = (await client.get("models")).json()
        assert [model["id"] for model in listed["data"]] == ["solver", "alias"]
        assert (await client.get("models/alias")).json()["object"] == "model"
        assert (await client.get("models/other")).status_code == 404
        listed = (await client.get("models", headers=ANTHROPIC)).json()
        assert (listed["first_id"], listed["has_more"]) == ("solver", False)
        reply = await client.post("chat/completions", json={**CHAT, "model": "gpt-5"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_body_that_is_none_is_refused() -> None:
    async with connected() as (client, _, _):
        for content in (b"{", b"[]", b"\xff", b"[" * 100_000):
            assert (await client.post("chat/completions", content=content)).status_code == 400
        assert (await client.post("chat/completions", json={**CHAT, "model": None})).status_code == 400


async def test_a_body_has_a_limit_of_size() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 1000

    with mock.patch.object(http_request, "MOST_BODY_BYTES", 10_000):
        async with connected() as (client, _, _):
            assert (await client.post("messages", content=b" " * 10_001)).status_code == 413
            try:
                assert (await client.post("messages", content=endless())).status_code == 413
            except httpx2.HTTPError:
                pass  # it is refused before all of it is written


async def test_a_body_has_a_limit_of_time() -> None:
    with mock.patch.object(http_request, "BODY_S", 0.05):
        async with connected() as (_, gateway, _):
            host, port = gateway.url.split("/")[2].split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            lines = (
                "POST /v1/messages HTTP/1.1",
                f"host: {host}",
                f"x-api-key: {gateway.key}",
                "content-length: 9",
            )
            writer.write("\r\n".join((*lines, "", "")).encode())
            reply = await asyncio.wait_for(reader.read(), PATIENCE_S)
            assert reply.startswith(b"HTTP/1.1 408")
            writer.close()


async def test_requests_have_a_limit_of_number() -> None:
    with mock.patch.object(http_app, "MOST_OPEN_REQUESTS", 0):
        async with connected() as (client, _, _):
            reply = await client.post("messages", json=CHAT)
            assert (reply.status_code, reply.json()["error"]["type"]) == (429, "rate_limit_error")


async def test_a_session_of_the_url_needs_its_key() -> None:
    async with connected() as (client, gateway, _):
        reply = await client.post("messages", json=CHAT, headers={"Authorization": "Bearer other"})
        assert reply.status_code == 401
        assert gateway.key not in reply.text
