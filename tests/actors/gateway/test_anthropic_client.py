"""Episodes of the ``anthropic`` package."""

from typing import Any

import pytest

from .clients import EPISODE, PARAMETERS, QUESTION, RESULT, check_episode, scripted


@pytest.fixture(autouse=True, scope="module")
def package() -> None:
    """Imported here and not with this file, which every process of the tests imports: it takes two seconds."""
    pytest.importorskip("anthropic")


TOOL: Any = {
    "name": "add",
    "description": "The sum.",
    "input_schema": PARAMETERS,
    "cache_control": {"type": "ephemeral"},
}
SYSTEM: Any = [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}]


@pytest.mark.parametrize("stream", [False, True])
async def test_messages(stream: bool) -> None:
    async with scripted(*EPISODE) as (gateway, _), client_of(gateway) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        asked = {"model": "solver", "max_tokens": 1024, "system": SYSTEM, "tools": [TOOL]}
        for _ in EPISODE:
            if stream:
                async with client.messages.stream(messages=messages, **asked) as events:
                    reply = await events.get_final_message()
            else:
                reply = await client.messages.create(messages=messages, **asked)
            messages.append({"role": "assistant", "content": reply.content})
            results = [result(block) for block in reply.content if block.type == "tool_use"]
            messages += [{"role": "user", "content": results}] if results else []
        assert (reply.content[0].text, reply.stop_reason) == (RESULT, "end_turn")
        assert reply.usage.output_tokens == len(RESULT)
        assert reply.usage.input_tokens == len(gateway.turns[-1].prompt_tokens)
        check_episode(gateway)


async def test_the_thought_is_a_block_of_its_own() -> None:
    async with scripted(EPISODE[1]) as (gateway, _), client_of(gateway) as client:
        reply = await client.messages.create(
            model="solver", max_tokens=9, messages=[{"role": "user", "content": QUESTION}], tools=[TOOL]
        )
        assert [block.type for block in reply.content] == ["thinking", "tool_use"]
        assert (reply.content[0].thinking, reply.content[1].input) == ("Again, to be sure.", {"a": 1, "b": 2})


async def test_a_stop_sequence_is_named() -> None:
    async with scripted("1 Observation:") as (gateway, _), client_of(gateway) as client:
        reply = await client.messages.create(
            model="solver",
            max_tokens=9,
            messages=[{"role": "user", "content": QUESTION}],
            stop_sequences=["Observation:"],
        )
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "Observation:")
        assert reply.content[0].text == "1"


async def test_errors_are_the_client_s_own() -> None:
    import anthropic

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with scripted(RuntimeError("lost")) as (gateway, _), client_of(gateway) as client:
        with pytest.raises(anthropic.NotFoundError, match="there is no model"):
            await client.messages.create(model="claude", max_tokens=9, messages=messages)
        with pytest.raises(anthropic.InternalServerError, match="lost"):
            await client.messages.create(model="solver", max_tokens=9, messages=messages)
        with pytest.raises(anthropic.NotFoundError, match="counted where a turn is generated"):
            await client.messages.count_tokens(model="solver", messages=messages)
        assert [model.id async for model in client.models.list()] == ["solver", "alias"]


def client_of(gateway: Any) -> Any:
    import anthropic

    return anthropic.AsyncAnthropic(
        base_url=gateway.env["ANTHROPIC_BASE_URL"], api_key=gateway.env["ANTHROPIC_API_KEY"]
    )


def result(block: Any) -> dict[str, Any]:
    total = str(block.input["a"] + block.input["b"])
    return {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": total}]}
