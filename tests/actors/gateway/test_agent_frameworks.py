"""Episodes of frameworks that programs are written with: OpenAI's agents, LangChain and LangGraph."""

from typing import Any

import pytest

from .clients import EPISODE, QUESTION, RESULT, check_episode, scripted

EXTRA = "needs the extra: pip install 'flexmarl[clients]'"


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_openai_agents(api: str, stream: bool) -> None:
    agents = pytest.importorskip("agents", reason=EXTRA)
    openai = pytest.importorskip("openai", reason=EXTRA)
    agents.set_tracing_disabled(True)

    @agents.function_tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> str:
        """The sum."""
        return str(a + b)

    async with scripted(*EPISODE) as (gateway, _):
        client = openai.AsyncOpenAI(
            base_url=gateway.env["OPENAI_BASE_URL"], api_key=gateway.env["OPENAI_API_KEY"]
        )
        make = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        solver = agents.Agent(
            name="solver", instructions="Add.", tools=[add], model=make(model="solver", openai_client=client)
        )
        async with client:
            if stream:
                result = agents.Runner.run_streamed(solver, QUESTION)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(solver, QUESTION)
        assert result.final_output == RESULT
        check_episode(gateway)


@pytest.mark.parametrize("use_responses_api", [False, True])
async def test_langgraph(use_responses_api: bool) -> None:
    langchain_openai = pytest.importorskip("langchain_openai", reason=EXTRA)
    graph = pytest.importorskip("langgraph.graph", reason=EXTRA)
    prebuilt = pytest.importorskip("langgraph.prebuilt", reason=EXTRA)

    def add(a: int, b: int) -> int:
        """The sum."""
        return a + b

    openai = pytest.importorskip("openai", reason=EXTRA)

    # The client that LangChain makes by itself stays until the process ends, with an open connection.
    async with scripted(*EPISODE) as (gateway, _), openai.DefaultAsyncHttpxClient() as http:
        model = langchain_openai.ChatOpenAI(
            model="solver",
            base_url=gateway.env["OPENAI_BASE_URL"],
            api_key=gateway.env["OPENAI_API_KEY"],
            http_async_client=http,
            use_responses_api=use_responses_api,
        ).bind_tools([add])

        async def ask(state: Any) -> Any:
            return {"messages": [await model.ainvoke(state["messages"])]}

        builder = graph.StateGraph(graph.MessagesState)
        builder.add_node("ask", ask)
        builder.add_node("tools", prebuilt.ToolNode([add]))
        builder.add_edge(graph.START, "ask")
        builder.add_conditional_edges("ask", prebuilt.tools_condition)
        builder.add_edge("tools", "ask")
        end = await builder.compile().ainvoke({"messages": [("system", "Add."), ("user", QUESTION)]})
        assert end["messages"][-1].text == RESULT
        check_episode(gateway)
