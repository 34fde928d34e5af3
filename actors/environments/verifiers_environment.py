"""Environments of verifiers (its v1 interface: ``async run(task, agents)``) as workflows: ``pip install verifiers``.

    run ──> agents.solver.run(task), agents.solver.interaction(task) ──> turns of the run's agents ──> traces
    finalize ──> rewards of the traces ──> Rewards

Each agent of the environment is the run's agent of the same name: a seat. An agent is a chat without tools, as the
``null`` harness of verifiers: the system prompt and the prompt of the task, and then its turns. Other harnesses,
runtimes and tool servers of verifiers are not used; hooks of a task that need a runtime are left out of its score, as
verifiers does without one.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ..errors import InvalidEnvironment, LimitReached
from ..messages import Query
from ..workflow import Agent, Agents, Message, Rewards, Turn, Workflow

if TYPE_CHECKING:
    import verifiers.v1 as vf


def verifiers_workflow(env: "vf.Env[Any]", task_of: Callable[[Query], "vf.Task[Any, Any, Any]"]) -> Workflow:
    """The workflow that ``env`` stands for: ``workflow = verifiers_workflow(MyEnv(config), task_of)``. ``task_of``
    makes a query the environment's task.

    An agent's reward is the mean of its traces' rewards. Their metrics are the trajectory's, ``<agent>/<metric>``. An
    agent at a limit of turns or tokens ends its interaction, as verifiers' own limits do. The workflow raises
    InvalidEnvironment if the environment runs no agent.
    """

    async def workflow(query: Query, agents: Agents) -> Rewards:
        from verifiers.v1.episode import Episode

        task = task_of(query)
        episode: Any = Episode(task=_trace_task(task))
        seats = _Seats(agents, episode.traces)
        await env.setup(seats)
        await env.run(task, seats)
        if not episode.traces:
            raise InvalidEnvironment(f"{type(env).__name__}.run ran no agent")
        await env.finalize(task, episode)
        return _rewards(episode.traces)

    return workflow


def _rewards(traces: Sequence[Any]) -> Rewards:
    by_agent: dict[str, list[float]] = {}
    metrics: dict[str, list[float]] = {}
    for trace in traces:
        by_agent.setdefault(trace.agent.name, []).append(trace.reward)
        for name, value in trace.metrics.items():
            if value is not None:
                metrics.setdefault(f"{trace.agent.name}/{name}", []).append(value)
    return Rewards(metrics=_means(metrics), **_means(by_agent))


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def _trace_task(task: Any) -> Any:
    from verifiers.v1.trace import TraceTask

    return TraceTask(type=type(task).__name__, data=task.data)


class _Seats:
    """The agents of one trajectory by attribute, as verifiers' ``Agents``."""

    def __init__(self, agents: Agents, traces: list[Any]) -> None:
        self._agents, self._traces = agents, traces
        self._seats: dict[str, _Seat] = {}

    def __getattr__(self, name: str) -> "_Seat":
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._seats:
            self._seats[name] = _Seat(name, self._agents[name], self._traces)
        return self._seats[name]


class _Seat:
    """One agent. ``trainable`` is for environments that set it; the config says which policies are trained."""

    def __init__(self, name: str, agent: Agent, traces: list[Any]) -> None:
        self.name, self.trainable = name, True
        self._agent, self._traces = agent, traces

    async def run(self, task: Any, **_: object) -> Any:
        """One answer to the task's prompt, scored by the task."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: object) -> AsyncIterator["_Interaction"]:
        """A conversation, scored by the task at its end. Its trace joins the episode."""
        interaction = _Interaction(self, self._agent, task)
        try:
            yield interaction
            await task.score(interaction.trace)
        finally:
            interaction.trace.is_completed = True
            self._traces.append(interaction.trace)
        interaction.trace.ok = True


class _Interaction:
    """A conversation with an agent; its caller is the user."""

    def __init__(self, seat: _Seat, agent: Agent, task: Any) -> None:
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.trace import AgentInfo, Trace

        self._agent, self._data = agent, task.data
        self._last: Turn | None = None
        self._is_over = False
        info = AgentInfo(config=AgentConfig(), name=seat.name, trainable=seat.trainable)
        self.trace: Any = Trace(task=_trace_task(task), agent=info)

    async def turn(self, message: str | Sequence[Any] | None = None) -> Any:
        """One answer. Without a message it is the answer to the task's prompt. Raises InvalidEnvironment for a message
        besides that prompt, for none without a prompt, and after the end of the conversation."""
        from verifiers.v1.agent import Segment

        if self._is_over:
            raise InvalidEnvironment(f"{self.trace.agent.name}: a turn after the end of the conversation")
        messages = self._messages(message)
        try:
            self._last = turn = await self._agent.generate([*([self._last] if self._last else []), *messages])
        except LimitReached as limit:
            self._is_over = True
            self.trace.stop("max_turns" if limit.key.endswith("turns") else "max_output_tokens")
            return Segment(messages=[], terminated=True)
        for chat_message in messages:
            self._add(chat_message)
        return Segment(messages=[self._add({"role": "assistant", "content": turn.text}, sampled=True)])

    def _messages(self, message: str | Sequence[Any] | None) -> list[Message]:
        """The new messages: those of the task first."""
        data, begins = self._data, self._last is None
        if (message is None) != (begins and data.prompt is not None):
            raise InvalidEnvironment(
                f"{self.trace.agent.name}: a turn takes a message, but the first one of a task with a prompt"
            )
        said = data.prompt if message is None else message
        new = [{"role": "user", "content": said}] if isinstance(said, str) else list(map(_plain, said))
        system = data.system_prompt if begins else None
        return [*([{"role": "system", "content": system}] if system else []), *new]

    def _add(self, message: Message, *, sampled: bool = False) -> Any:
        from verifiers.v1.dialects import parse_message
        from verifiers.v1.graph import MessageNode

        nodes = self.trace.nodes
        typed = parse_message(dict(message))
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=typed, sampled=sampled))
        return typed


def _plain(message: Any) -> Message:
    return message if isinstance(message, Mapping) else {"role": message.role, "content": message.content}
