"""Episodes of the ``openai`` package."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from .clients import EPISODE, PARAMETERS, QUESTION, RESULT, check_episode, scripted


@pytest.fixture(autouse=True, scope="module")
def package() -> None:
    """Imported here and not with this file, which every process of the tests imports: it takes a second."""
    pytest.importorskip("openai")


CHAT_TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "The sum.", "parameters": PARAMETERS},
}
TOOL = {"type": "function", "name": "add", "description": "The sum.", "parameters": PARAMETERS}


def add(arguments: str) -> str:
    numbers = json.loads(arguments)
    return str(numbers["a"] + numbers["b"])


async def test_chat() -> None:
    async with scripted(*EPISODE) as (gateway, _), client_of(gateway) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in EPISODE:
            reply = await client.chat.completions.create(model="solver", messages=messages, tools=[CHAT_TOOL])
            message = reply.choices[0].message
            messages.append(message)
            messages += [replied(call.id, call.function.arguments) for call in message.tool_calls or ()]
        assert (message.content, reply.choices[0].finish_reason) == (RESULT, "stop")
        assert reply.usage.completion_tokens == len(RESULT)
        check_episode(gateway)


async def test_streamed_chat() -> None:
    """By the client's own accumulation of the chunks."""
    async with scripted(*EPISODE) as (gateway, _), client_of(gateway) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in EPISODE:
            async with client.chat.completions.stream(
                model="solver", messages=messages, tools=[CHAT_TOOL], stream_options={"include_usage": True}
            ) as stream:
                completion = await stream.get_final_completion()
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            messages += [replied(call.id, call.function.arguments) for call in message.tool_calls or ()]
        assert message.content == RESULT
        assert completion.usage.completion_tokens == len(RESULT)
        check_episode(gateway)


async def test_responses_with_all_items() -> None:
    async with scripted(*EPISODE) as (gateway, _), client_of(gateway) as client:
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in EPISODE:
            reply = await client.responses.create(
                model="solver", input=items, tools=[TOOL], instructions="Add.", store=False
            )
            items += reply.output
            items += [output(item) for item in reply.output if item.type == "function_call"]
        assert reply.output_text == RESULT
        check_episode(gateway)


async def test_streamed_responses_with_the_id_of_the_last_one() -> None:
    """The client checks the order of the events: it builds the response of them."""
    async with scripted(*EPISODE) as (gateway, _), client_of(gateway) as client:
        items: Any = QUESTION
        previous: str | None = None
        for _ in EPISODE:
            async with client.responses.stream(
                model="solver", input=items, tools=[TOOL], previous_response_id=previous
            ) as stream:
                kinds = [event.type async for event in stream]
                reply = await stream.get_final_response()
            assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
            items = [output(item) for item in reply.output if item.type == "function_call"]
            previous = reply.id
        assert reply.output_text == RESULT
        check_episode(gateway)


async def test_completions() -> None:
    async with scripted("3", " and 2 more is 5") as (gateway, _), client_of(gateway) as client:
        prompt = QUESTION
        for stream in (False, True):
            reply = await client.completions.create(model="solver", prompt=prompt, stream=stream)
            prompt += (
                "".join([part.choices[0].text async for part in reply]) if stream else reply.choices[0].text
            )
            prompt += "."
        assert prompt == f"{QUESTION}3. and 2 more is 5."
        check_episode(gateway, ["3", " and 2 more is 5"])


XML: Any = {"type": "xml"}


async def test_errors_are_the_client_s_own() -> None:
    import openai

    async with scripted(RuntimeError("lost")) as (gateway, _), client_of(gateway) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-5'"):
            await client.chat.completions.create(model="gpt-5", messages=messages)
        with pytest.raises(openai.BadRequestError, match="needs text, json_object or json_schema"):
            await client.chat.completions.create(model="solver", messages=messages, response_format=XML)
        with pytest.raises(openai.InternalServerError, match="lost"):
            await client.responses.create(model="solver", input=QUESTION)
        assert [model.id async for model in client.models.list()] == ["solver", "alias"]


def client_of(gateway: Any) -> Any:
    import openai

    return openai.AsyncOpenAI(base_url=gateway.env["OPENAI_BASE_URL"], api_key=gateway.env["OPENAI_API_KEY"])


def replied(call_id: str, arguments: str) -> Mapping[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": add(arguments)}


def output(item: Any) -> Mapping[str, Any]:
    return {"type": "function_call_output", "call_id": item.call_id, "output": add(item.arguments)}
