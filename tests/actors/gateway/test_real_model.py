"""Episodes of real clients with a real model: what the trainer gets is what the engine generated, bit for bit.

A tiny model on the embedded engine calls a tool in every turn (``steered_model.py``), the client's own API takes the
call, runs the tool and asks again, in streams too; so do openai-agents, LangGraph, litellm and mini-swe-agent where
they are installed. Two trajectories at once, of three turns each. The rows that a trainer leases from the store are
compared with the requests and the results of the engine itself (log-probabilities in float32, as the store keeps them);
each turn's prompt has to begin with the prompt and the tokens of the turn before it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult
from flexmarl.actors.inference.engines.threaded_engine import ThreadedEngine
from flexmarl.actors.inference.inference_config import EmbeddedEngineConfig
from flexmarl.actors.inference.instance import Instance
from flexmarl.actors.inference.instance_setup import InstanceSetup, ServedPolicy
from flexmarl.actors.messages import Published, Query
from flexmarl.actors.names import AgentName, PolicyName, Version
from flexmarl.actors.rollout.rollout import Rollout
from flexmarl.actors.rollout.rollout_config import SamplingConfig
from flexmarl.core.system import ActorSystem
from flexmarl.transport.state import StateTransport

from ...patience import PATIENCE_S
from ..rollout.fake_cluster import FakeCluster, start_step
from . import test_anthropic_client as of_anthropic
from . import test_litellm_clients as of_litellm
from . import test_openai_clients as of_openai
from .clients import QUESTION
from .steered_model import steered_model
from .test_agent_frameworks import EXTRA

without_network = of_litellm.without_network

SOLVER = PolicyName("solver")
TURNS = 3
TRAJECTORIES = 2
BODY = """
    from {module} import {function} as play
    from flexmarl.actors.gateway.gateway import open_gateway
    async with open_gateway(agents) as gateway:
        await play(gateway)
        assert gateway.counts == {{"begun": 1, "merged": {turns} - 1}}, gateway.counts
    return Rewards(solver=float(len(gateway.turns[0].tokens)))
"""
Results = dict[str, tuple[EngineRequest, EngineResult]]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Results:
    """Requests to the engines of this process and their results, by the sample's id."""
    noted: Results = {}
    generate: Callable[..., Awaitable[EngineResult]] = ThreadedEngine.generate

    async def note(engine: ThreadedEngine, request: EngineRequest, *arguments: Any) -> EngineResult:
        result = await generate(engine, request, *arguments)
        assert request.request_id not in noted
        noted[request.request_id] = request, result
        return result

    monkeypatch.setattr(ThreadedEngine, "generate", note)
    return noted


@asynccontextmanager
async def cluster_of_a_model(
    system: ActorSystem, private: Path, folder: Path, body: str, tool: str, arguments: Mapping[str, Any]
) -> AsyncIterator[tuple[FakeCluster, Rollout]]:
    """A rollout actor, a store and a router with one instance, which serves version 0 of the model. It calls ``tool``
    with ``arguments``."""
    model, weights = steered_model(folder / "tokenizer", tool, arguments)
    cluster = FakeCluster(system, folder)
    engine = EmbeddedEngineConfig(max_batch=TRAJECTORIES)
    instance: Any = Instance(InstanceSetup(SOLVER, {SOLVER: ServedPolicy(model, engine)}))
    cluster.instances = {SOLVER: [instance]}
    cluster.policies = {SOLVER: SOLVER}
    cluster.sampling = {SOLVER: SamplingConfig(max_new_tokens=256)}
    rollout = await cluster.open(body)
    async with StateTransport(private) as transport:
        handle = await transport.set(SOLVER, weights, version=0)
        await cluster.router.ref.within(PATIENCE_S).publish(Published(SOLVER, Version(0), handle))
        yield cluster, rollout


async def chat(gateway: Any) -> None:
    async with of_openai.client_of(gateway) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in range(TURNS):
            reply = await client.chat.completions.create(
                model="solver", messages=messages, tools=[of_openai.CHAT_TOOL]
            )
            assert reply.choices[0].finish_reason == "tool_calls"
            assert reply.usage.completion_tokens == len(gateway.turns[-1].tokens)
            message = reply.choices[0].message
            messages += [
                message,
                *(of_openai.replied(c.id, c.function.arguments) for c in message.tool_calls),
            ]


async def streamed_chat(gateway: Any) -> None:
    async with of_openai.client_of(gateway) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in range(TURNS):
            async with client.chat.completions.stream(
                model="solver", messages=messages, tools=[of_openai.CHAT_TOOL]
            ) as stream:
                completion = await stream.get_final_completion()
            assert completion.choices[0].finish_reason == "tool_calls"
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            messages += [of_openai.replied(call.id, call.function.arguments) for call in message.tool_calls]


async def responses(gateway: Any) -> None:
    """Each request has all items."""
    async with of_openai.client_of(gateway) as client:
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in range(TURNS):
            reply = await client.responses.create(
                model="solver", input=items, tools=[of_openai.TOOL], instructions="Add.", store=False
            )
            assert reply.usage.output_tokens == len(gateway.turns[-1].tokens)
            items += [*reply.output, *outputs(reply)]


async def streamed_responses(gateway: Any) -> None:
    """Each request has the id of the last response alone."""
    async with of_openai.client_of(gateway) as client:
        items: Any = QUESTION
        previous: str | None = None
        for _ in range(TURNS):
            async with client.responses.stream(
                model="solver", input=items, tools=[of_openai.TOOL], previous_response_id=previous
            ) as stream:
                reply = await stream.get_final_response()
            items, previous = outputs(reply), reply.id


def outputs(reply: Any) -> list[Any]:
    (call,) = (item for item in reply.output if item.type == "function_call")
    return [of_openai.output(call)]


async def messages(gateway: Any) -> None:
    await _messages(gateway, stream=False)


async def streamed_messages(gateway: Any) -> None:
    await _messages(gateway, stream=True)


async def _messages(gateway: Any, *, stream: bool) -> None:
    async with of_anthropic.client_of(gateway) as client:
        history: list[Any] = [{"role": "user", "content": QUESTION}]
        asked = {
            "model": "solver", "max_tokens": 256, "system": of_anthropic.SYSTEM, "tools": [of_anthropic.TOOL],
        }  # fmt: skip
        for _ in range(TURNS):
            if stream:
                async with client.messages.stream(messages=history, **asked) as events:
                    reply = await events.get_final_message()
            else:
                reply = await client.messages.create(messages=history, **asked)
            assert reply.stop_reason == "tool_use"
            assert reply.usage.output_tokens == len(gateway.turns[-1].tokens)
            history.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            history.append({"role": "user", "content": [of_anthropic.result(call) for call in calls]})


async def openai_agents(gateway: Any) -> None:
    """To its own limit of turns, since the model ends none without a call."""
    agents = import_module("agents")
    agents.set_tracing_disabled(True)

    @agents.function_tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> str:
        """The sum."""
        return str(a + b)

    async with of_openai.client_of(gateway) as client:
        model = agents.OpenAIChatCompletionsModel(model="solver", openai_client=client)
        solver = agents.Agent(name="solver", instructions="Add.", tools=[add], model=model)
        with pytest.raises(agents.MaxTurnsExceeded):
            await agents.Runner.run(solver, QUESTION, max_turns=TURNS)


async def langgraph(gateway: Any) -> None:
    langchain_openai, graph = import_module("langchain_openai"), import_module("langgraph.graph")
    prebuilt = import_module("langgraph.prebuilt")

    def add(a: int, b: int) -> int:
        """The sum."""
        return a + b

    async with import_module("openai").DefaultAsyncHttpxClient() as http:
        model = langchain_openai.ChatOpenAI(
            model="solver",
            base_url=gateway.env["OPENAI_BASE_URL"],
            api_key=gateway.env["OPENAI_API_KEY"],
            http_async_client=http,
        ).bind_tools([add])

        async def ask(state: Any) -> Any:
            return {"messages": [await model.ainvoke(state["messages"])]}

        builder = graph.StateGraph(graph.MessagesState)
        builder.add_node("ask", ask)
        builder.add_node("tools", prebuilt.ToolNode([add]))
        builder.add_edge(graph.START, "ask")
        builder.add_conditional_edges("ask", lambda _: "tools" if len(gateway.turns) < TURNS else graph.END)
        builder.add_edge("tools", "ask")
        await builder.compile().ainvoke({"messages": [("system", "Add."), ("user", QUESTION)]})


async def litellm(gateway: Any) -> None:
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(TURNS):
        reply = await import_module("litellm").acompletion(
            "openai/solver", history, tools=[of_litellm.TOOL], **of_litellm.place_of(gateway)
        )
        message = reply.choices[0].message
        history += [message, *(of_litellm.replied(call) for call in message.tool_calls)]


async def mini_swe_agent(gateway: Any) -> None:
    """To its own limit of steps, since the model never submits."""
    model = import_module("minisweagent.models.litellm_model").LitellmModel(
        model_name="openai/solver", model_kwargs=of_litellm.place_of(gateway)
    )
    agent = import_module("minisweagent.agents.default").DefaultAgent(
        model, import_module("minisweagent.environments.local").LocalEnvironment(),
        system_template="Work in a shell.", instance_template="{{ task }}", step_limit=TURNS,
    )  # fmt: skip
    end = await asyncio.to_thread(agent.run, QUESTION)
    assert end["exit_status"] == "LimitsExceeded"


Play = Callable[..., Awaitable[None]]
NEEDS: Mapping[Play, list[str]] = {
    openai_agents: ["agents"],
    langgraph: ["langchain_openai", "langgraph.prebuilt"],
    litellm: ["litellm"],
    mini_swe_agent: ["minisweagent.agents.default", "minisweagent.models.litellm_model"],
}
"""The modules of the plays that only the extra ``clients`` can play."""
PLAYS = [chat, streamed_chat, responses, streamed_responses, messages, streamed_messages, *NEEDS]
CALLS: Mapping[Play, tuple[str, Mapping[str, Any]]] = {mini_swe_agent: ("bash", {"command": "true"})}


@pytest.mark.filterwarnings("ignore:.*:UserWarning:pydantic", "ignore::ResourceWarning")  # of litellm
@pytest.mark.parametrize("play", PLAYS, ids=lambda play: play.__name__)
async def test_the_trainer_gets_what_the_engine_generated(
    system: ActorSystem, private: Path, tmp_path: Path, results: Results, play: Play
) -> None:
    for module in ("openai", "anthropic"):
        pytest.importorskip(module)
    for module in NEEDS.get(play, ()):
        pytest.importorskip(module, reason=EXTRA)
    body = BODY.format(module=play.__module__, function=play.__name__, turns=TURNS)
    call = CALLS.get(play, ("add", {"a": 1, "b": 2}))
    async with cluster_of_a_model(system, private, tmp_path, body, *call) as (cluster, rollout):
        await start_step(rollout, 1, [Query("q", "")], TRAJECTORIES, {SOLVER: 0})
        group = await cluster.closed()
        assert group.samples == {AgentName(SOLVER): TURNS * TRAJECTORIES}, group
        rows = {row.sample_id: row for row in await cluster.rows(SOLVER, 0, TURNS * TRAJECTORIES)}
    if play is litellm:  # its worker outlives its calls
        await import_module("litellm.litellm_core_utils.logging_worker").GLOBAL_LOGGING_WORKER.stop()
    assert rows.keys() == results.keys()
    for sample_id, row in rows.items():
        request, result = results[sample_id]
        assert row.prompt_tokens == request.prompt_tokens
        assert row.tokens == result.tokens
        assert row.logprobs == tuple(np.array(result.logprobs, np.float32).tolist()), (
            "as the store keeps them"
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert any(
        tuple(tokenizer.encode(tokenizer.decode(row.tokens))) != row.tokens for row in rows.values()
    ), "texts that are encoded again would prove nothing"
    for trajectory in range(TRAJECTORIES):
        turns = [rows[f"1:q_{number}_{trajectory}"] for number in range(TURNS)]
        for before, after in pairwise(turns):
            known = before.prompt_tokens + before.tokens
            assert after.prompt_tokens[: len(known)] == known and len(after.prompt_tokens) > len(known)
