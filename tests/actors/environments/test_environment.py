"""Environments as workflows: conversations that continue, states that never mix, ends, and mistakes by name."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from flexmarl.actors.environments.environment import (
    Ask,
    Environment,
    Environments,
    environment_problems,
    play,
)
from flexmarl.actors.errors import InvalidEnvironment, LimitReached
from flexmarl.actors.messages import Query
from flexmarl.actors.workflow import Rewards, Turn


class Scripted:
    """Answers with its own name and the number of its turns; keeps its prompts and options."""

    def __init__(self, name: str, fails_at: int = 0) -> None:
        self.name, self.fails_at = name, fails_at
        self.asked: list[tuple[Any, dict[str, Any]]] = []

    async def generate(self, prompt: Any, **options: Any) -> Turn:
        self.asked.append((prompt, options))
        await asyncio.sleep(0)
        if len(self.asked) == self.fails_at:
            raise LimitReached(self.name, "rollout.trajectory_turns", self.fails_at)
        return Turn(self.name, f"{self.name}{len(self.asked)}", (), ())


class Counts(Environment):
    """Ends after as many steps as the query says, and pays the number on its own board."""

    async def setup(self, start: int = 0) -> None:
        self.start = start
        self.log: list[str] = []

    async def reset(self, query: Query) -> Any:
        self.board = [self.start]
        self.wanted = query.data["steps"]
        return {"solver": query.text}

    async def step(self, turns: Mapping[str, Turn]) -> Any:
        self.board.append(self.board[-1] + 1)
        if len(self.board) > self.wanted:
            return Rewards(solver=float(self.board[-1]))
        return {"solver": f"next {len(self.board)}"}

    async def end(self) -> None:
        self.log.append("end")

    async def close(self) -> None:
        self.log.append("close")


def query(steps: int = 2) -> Query:
    return Query("q", "begin", {"steps": steps})


async def rewards(environment: Environment, agents: Mapping[str, Any]) -> dict[str, float]:
    return (await play(environment, query(), agents)).by_agent


async def test_the_conversation_of_an_agent_continues_by_itself() -> None:
    solver = Scripted("solver")
    shared = Environments(Counts)
    await shared.setup({})
    await shared(query(3), {"solver": solver})
    (first, _), (second, _), (third, _) = solver.asked
    assert first == "begin"
    assert [part if isinstance(part, str) else part.text for part in second] == ["solver1", "next 2"]
    assert [part if isinstance(part, str) else part.text for part in third] == ["solver2", "next 3"]


async def test_what_setup_assigns_is_shared_and_all_else_is_the_trajectorys() -> None:
    shared = Environments(Counts)
    await shared.setup({"start": 10})
    steps = [1, 5, 2, 4]
    found = await asyncio.gather(*(shared(query(n), {"solver": Scripted("solver")}) for n in steps))
    assert [one.by_agent["solver"] for one in found] == [10.0 + n for n in steps]
    opened = shared._opened
    assert isinstance(opened, Counts) and opened.log == ["end"] * 4 and not hasattr(opened, "board")
    await shared.close()
    assert opened.log[-1] == "close"


class HalfOpen(Counts):
    """Opens one thing, and can't open the second."""

    closed: ClassVar[list[str]] = []

    async def setup(self, start: int = 0) -> None:
        self.first = "a server"
        raise OSError("no second server")

    async def close(self) -> None:
        self.closed.append(self.first)
        raise ValueError("it is busy")


async def test_what_a_failing_setup_has_opened_is_closed() -> None:
    shared = Environments(HalfOpen)
    with pytest.raises(OSError, match="no second server") as raised:
        await shared.setup({})
    assert HalfOpen.closed == ["a server"]
    assert raised.value.__notes__ == ["and close, after that: ValueError: it is busy"]
    await shared.close()
    assert HalfOpen.closed == ["a server"], "once"


@dataclass
class Remembers(Environment):
    """State in the class's own fields."""

    seen: list[str] = field(default_factory=list)

    async def reset(self, query: Query) -> Any:
        self.seen.append(query.text)
        return {"solver": ["a", "b"]}

    async def step(self, turns: Mapping[str, Turn]) -> Any:
        return Rewards(solver=float(len(self.seen)))


async def test_fields_of_a_dataclass_are_the_trajectorys() -> None:
    assert environment_problems(Remembers) == []
    shared = Environments(Remembers)
    await shared.setup({})
    for _ in range(2):
        assert (await shared(query(), {"solver": Scripted("solver")})).by_agent == {"solver": 1.0}


class Game(Environment):
    """Two players move at once, and then one alone."""

    async def reset(self, query: Query) -> Any:
        return {"one": Ask("go", stop="."), "two": {"role": "user", "content": "go"}}

    async def step(self, turns: Mapping[str, Turn]) -> Any:
        if len(turns) == 2:
            return {"one": Ask([turns["two"], " and now?"])}
        if len(self.turns["one"]) == 2:
            return {"one": Ask("again", new=True)}
        return Rewards(one=len(self.turns["one"]), two=len(self.turns["two"]))


async def test_several_agents_have_a_seat_each() -> None:
    one, two = Scripted("one"), Scripted("two")
    assert await rewards(Game(), {"one": one, "two": two}) == {"one": 3, "two": 1}
    assert one.asked[0] == ("go", {"stop": "."}), "options travel with the prompt"
    assert two.asked == [([{"role": "user", "content": "go"}], {})]
    assert one.asked[1][0][0].text == "two1", "a prompt with a turn is taken as it is"
    assert one.asked[2][0] == "again", "a new conversation"


async def test_a_limit_ends_the_trajectory_with_rewards_or_as_a_failure() -> None:
    with pytest.raises(LimitReached):
        await rewards(Remembers(), {"solver": Scripted("solver", fails_at=1)})

    class Forgiving(Remembers):
        async def truncated(self, limit: LimitReached) -> Rewards:
            return Rewards(solver=-1.0, metrics={"turns": limit.limit})

    assert await rewards(Forgiving(), {"solver": Scripted("solver", fails_at=1)}) == {"solver": -1.0}


class Broken(Environment):
    def __init__(self, result: Any) -> None:
        self.result, self.ended = result, 0

    async def reset(self, query: Query) -> Any:
        return {"solver": "x"}

    async def step(self, turns: Mapping[str, Turn]) -> Any:
        return self.result

    async def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (None, r"Broken.step returned NoneType: needs prompts by agent, or Rewards"),
        ("text", r"Broken.step returned str"),
        ({}, r"Broken.step returned no prompt"),
    ],
)
async def test_a_wrong_result_is_named_and_the_trajectory_ended(result: Any, problem: str) -> None:
    environment = Broken(result)
    with pytest.raises(InvalidEnvironment, match=problem):
        await rewards(environment, {"solver": Scripted("solver")})
    assert environment.ended == 1


async def test_a_step_after_the_end_is_refused_by_name() -> None:
    environment = Broken(Rewards(solver=1.0))
    assert await rewards(environment, {"solver": Scripted("solver")}) == {"solver": 1.0}
    with pytest.raises(InvalidEnvironment, match=r"Broken.step after the end of the trajectory"):
        await environment.step({})
    with pytest.raises(InvalidEnvironment, match=r"Broken.reset after the end"):
        await rewards(environment, {"solver": Scripted("solver")})


async def test_a_cancelled_trajectory_ends_its_environment() -> None:
    class Waits(Broken):
        async def step(self, turns: Mapping[str, Turn]) -> Any:
            await asyncio.Event().wait()

    environment = Waits(None)
    playing = asyncio.create_task(rewards(environment, {"solver": Scripted("solver")}))
    while not environment.turns.get("solver") if hasattr(environment, "turns") else True:
        await asyncio.sleep(0)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert environment.ended == 1


class Mistaken(Environment):
    history: Sequence[str] = []

    def __init__(self, size: int) -> None: ...

    def reset(self, query: Query) -> Any: ...

    async def close(self, now: bool) -> None: ...  # type: ignore[override]


def test_the_mistakes_of_a_class_are_all_named() -> None:
    assert environment_problems(Mistaken) == [
        "Mistaken.reset is not async: write `async def reset(self, query)`",
        "Mistaken.step is missing: write `async def step(self, turns)`",
        "Mistaken.close: missing a required argument: 'now': write `async def close(self)`",
        "Mistaken is made without arguments: missing a required argument: 'size'",
        "Mistaken.history is one list for all trajectories: assign it in reset, or in setup if it is shared",
    ]
    assert environment_problems(Counts) == [] and environment_problems(Game) == []
    assert environment_problems(int) == ["int is a class, and not derived from flexmarl.actors.Environment"]


class Tooled(Environment):
    async def reset(self, query: Query) -> Any:
        return {"solver": Ask("go", tools=[print])}

    async def step(self, turns: Mapping[str, Turn]) -> Any:
        rounds = len(self.turns["solver"])
        return Rewards(solver=1.0) if rounds == 3 else {"solver": Ask("x", new=rounds == 2)}


async def test_tools_stay_those_of_the_conversation() -> None:
    solver = Scripted("solver")
    await rewards(Tooled(), {"solver": solver})
    assert [options for _, options in solver.asked] == [{"tools": [print]}, {"tools": [print]}, {}]
