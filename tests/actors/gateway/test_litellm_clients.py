"""Episodes of ``litellm``, by each API that it speaks, and of ``mini-swe-agent``, which is written with it.

Both are large, and only the extra ``clients`` has them."""

import asyncio
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from .clients import EPISODE, PARAMETERS, QUESTION, RESULT, check_episode, scripted

EXTRA = "needs the extra: pip install 'flexmarl[clients]'"

TOOL = {"type": "function", "function": {"name": "add", "description": "The sum.", "parameters": PARAMETERS}}


@pytest.fixture(scope="module", autouse=True)
def without_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Both load lists from the network, and make folders, when they are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path_factory.mktemp("mini")))
        patch.setenv("MSWEA_SILENT_STARTUP", "1")
        patch.setenv("MSWEA_COST_TRACKING", "ignore_errors")
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["openai/solver", "anthropic/solver"])
@pytest.mark.parametrize("stream", [False, True])
async def test_litellm(model: str, stream: bool) -> None:
    litellm = pytest.importorskip("litellm", reason=EXTRA)
    async with scripted(*EPISODE) as (gateway, _):
        place = place_of(gateway, "OPENAI" if model.startswith("openai") else "ANTHROPIC")
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in EPISODE:
            reply = await litellm.acompletion(
                model, messages, tools=[TOOL], stream=stream, max_tokens=1024, **place
            )
            if stream:
                reply = litellm.stream_chunk_builder([chunk async for chunk in reply], messages=messages)
            message = reply.choices[0].message
            messages.append(message)
            messages += [replied(call) for call in message.tool_calls or ()]
        assert message.content == RESULT
        check_episode(gateway)


def place_of(gateway: Any, api: str = "OPENAI") -> dict[str, str]:
    return {"api_base": gateway.env[f"{api}_BASE_URL"], "api_key": gateway.env[f"{api}_API_KEY"]}


def replied(call: Any) -> dict[str, Any]:
    numbers = json.loads(call.function.arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])}


@pytest.mark.filterwarnings("ignore")
async def test_mini_swe_agent(tmp_path: Path) -> None:
    default = pytest.importorskip("minisweagent.agents.default", reason=EXTRA)
    local = pytest.importorskip("minisweagent.environments.local", reason=EXTRA)
    models = pytest.importorskip("minisweagent.models.litellm_model", reason=EXTRA)
    commands = ["echo 3 > sum", "cat sum", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat sum"]
    answers = [f"Now.\n{bash(command)}" for command in commands]
    async with scripted(*answers) as (gateway, _):
        place = place_of(gateway)
        agent = default.DefaultAgent(
            models.LitellmModel(model_name="openai/solver", model_kwargs=place),
            local.LocalEnvironment(cwd=str(tmp_path)),
            system_template="Work in a shell.",
            instance_template="{{ task }}",
        )
        end = await asyncio.to_thread(agent.run, QUESTION)
        close_clients()
        assert (end["exit_status"], end["submission"].strip()) == ("Submitted", "3")
        check_episode(gateway, answers)


def close_clients() -> None:
    """Ends the connections of ``litellm`` that no loop has: the package keeps their clients until the process ends."""
    openai, litellm = import_module("openai"), import_module("litellm")
    for client in litellm.in_memory_llm_clients_cache.cache_dict.values():
        if isinstance(client, openai.OpenAI):
            client.close()


def bash(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"
