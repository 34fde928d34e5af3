"""Environments of verifiers' interface as workflows. If verifiers is missing, plain records stand for its own; if it is
installed, two of its environments are played too."""

import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flexmarl.actors.environments.verifiers_environment import verifiers_workflow
from flexmarl.actors.errors import InvalidEnvironment, LimitReached
from flexmarl.actors.messages import Query
from flexmarl.actors.workflow import Rewards, Turn

IS_INSTALLED = importlib.util.find_spec("verifiers") is not None
QUERY = Query("q", "1 + 1", {"answer": "2"})


class Trace(SimpleNamespace):
    """The parts of verifiers' ``Trace`` that environments use."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(nodes=[], rewards={}, metrics={}, stop_condition=None, **fields)

    @property
    def reward(self) -> float:
        return float(sum(self.rewards.values()))

    @property
    def last_reply(self) -> str:
        return str([node.message.content for node in self.nodes if node.sampled][-1])

    def record_reward(self, name: str, value: float) -> None:
        self.rewards[name] = value

    def record_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value

    def stop(self, condition: str) -> None:
        self.stop_condition = condition


class Segment(SimpleNamespace):
    terminated = False

    @property
    def last_reply(self) -> str:
        return str(self.messages[-1].content)


@pytest.fixture(autouse=True)
def _records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the records' names, if verifiers is missing."""
    if IS_INSTALLED:
        return
    record = SimpleNamespace
    modules: dict[str, dict[str, Any]] = {
        "": {},
        ".v1": {},
        ".v1.configs": {},
        ".v1.configs.agent": {"AgentConfig": record},
        ".v1.episode": {"Episode": lambda task: record(task=task, traces=[])},
        ".v1.trace": {"Trace": Trace, "TraceTask": record, "AgentInfo": record},
        ".v1.agent": {"Segment": Segment},
        ".v1.graph": {"MessageNode": record},
        ".v1.dialects": {"parse_message": lambda message: record(**message)},
    }
    for name, content in modules.items():
        module = ModuleType(f"verifiers{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"verifiers{name}", module)


class Player:
    """Gives the answers of a list, and then is at its limit."""

    def __init__(self, name: str, *answers: str) -> None:
        self.name, self.answers = name, list(answers)
        self.asked: list[Any] = []

    async def generate(self, prompt: Sequence[Any], **_: Any) -> Turn:
        if not self.answers:
            raise LimitReached(self.name, "rollout.trajectory_turns", len(self.asked))
        self.asked.append([part.text if isinstance(part, Turn) else part for part in prompt])
        return Turn(self.name, self.answers.pop(0), (), ())


class Task:
    """A task of plain data. It pays for the right last reply."""

    def __init__(self, data: Any) -> None:
        self.data = data

    async def score(self, trace: Any) -> None:
        if trace.stop_condition is None:
            trace.record_reward("right", float(trace.last_reply == self.data.answer))


def task_of(query: Query) -> Any:
    data: dict[str, Any] = {"prompt": query.text, "system_prompt": None}
    if IS_INSTALLED:
        import verifiers.v1 as vf

        class Data(vf.TaskData):  # type: ignore[misc]
            answer: str

        return Task(Data(**data, answer=query.data["answer"]))
    return Task(SimpleNamespace(**data, answer=query.data["answer"]))


class Taught:
    """A teacher reads the student's answer; then the student answers again."""

    async def setup(self, agents: Any) -> None:
        agents.teacher.trainable = False

    async def run(self, task: Any, agents: Any) -> None:
        async with agents.student.interaction(task) as student:
            first = await student.turn()
            await agents.teacher.run(task)
            await student.turn(f"Not {first.last_reply}?")

    async def finalize(self, task: Any, episode: Any) -> None:
        for trace in episode.traces:
            trace.record_metric("trained", float(trace.agent.trainable))


async def play(env: Any, **agents: Any) -> Rewards:
    return (await verifiers_workflow(env, task_of)(QUERY, agents)).checked()


async def test_agents_have_a_seat_each_and_traces_their_rewards() -> None:
    student, teacher = Player("student", "3", "2"), Player("teacher", "4")
    found = await play(Taught(), student=student, teacher=teacher)
    assert found.by_agent == {"student": 1.0, "teacher": 0.0}
    assert found.metrics == {"student/trained": 1.0, "teacher/trained": 0.0}
    question = {"role": "user", "content": "1 + 1"}
    assert student.asked == [[question], ["3", {"role": "user", "content": "Not 3?"}]]
    assert teacher.asked == [[question]]


async def test_a_limit_ends_an_interaction_and_not_the_trajectory() -> None:
    found = await play(Taught(), student=Player("student", "3"), teacher=Player("teacher", "2"))
    assert found.by_agent == {"student": 0.0, "teacher": 1.0}


async def test_mistakes_of_an_environment_are_named() -> None:
    class Idle(Taught):
        async def run(self, task: Any, agents: Any) -> None: ...

    class Rude(Taught):
        async def run(self, task: Any, agents: Any) -> None:
            async with agents.student.interaction(task) as student:
                await student.turn("before the prompt")

    with pytest.raises(InvalidEnvironment, match=r"Idle.run ran no agent"):
        await play(Idle(), teacher=Player("teacher"))
    with pytest.raises(
        InvalidEnvironment, match="student: a turn takes a message, but the first one of a task"
    ):
        await play(Rude(), teacher=Player("teacher"), student=Player("student", "1"))


@pytest.mark.skipif(not IS_INSTALLED, reason="verifiers is not installed")
async def test_environments_of_verifiers_play() -> None:
    import verifiers.v1 as vf
    from verifiers.v1.envs.best_of_n.env import BestOfNEnv
    from verifiers.v1.envs.user_sim.env import DONE, PERSONA, UserSimEnv

    class Data(vf.TaskData):  # type: ignore[misc]
        answer: str

    class Sum(vf.Task[Data]):  # type: ignore[misc]
        @vf.reward  # type: ignore[untyped-decorator]
        async def right(self, trace: vf.Trace) -> float:
            return float(trace.last_reply == self.data.answer)

    def sum_of(query: Query) -> Any:
        return Sum(Data(prompt=query.text, answer=query.data["answer"]))

    def made(cls: Any, **config: Any) -> Any:
        env = cls.__new__(cls)  # without a folder of tasks: queries are the tasks
        env.config = SimpleNamespace(**config)
        return env

    players: dict[str, Any] = {"agent": Player("agent", "1", "2", "3")}
    best = verifiers_workflow(made(BestOfNEnv, n=3, threshold=1.0), sum_of)
    found = await best(QUERY, players)
    assert found.by_agent == {"agent": pytest.approx(1 / 3)} and found.metrics["agent/pass_at_n"] == 1.0
    talk = verifiers_workflow(made(UserSimEnv, persona=PERSONA, done_marker=DONE), sum_of)
    players = {"user": Player("user", "add 1 and 1", DONE), "assistant": Player("assistant", "2")}
    found = await talk(QUERY, players)
    assert found.by_agent == {"user": 0.0, "assistant": 1.0}
    assert found.metrics == {"assistant/user_turns": 2.0}
