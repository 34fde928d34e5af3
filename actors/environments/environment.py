"""Environments: classes that are turned into workflows.

    recipe.workflow ──> Environments.__call__ ──> reset ──> turns of the agents asked ──> step ──> ... ──> Rewards

A worker makes one object for ``setup`` and ``close``, and a new one for each trajectory. The attributes
that ``setup`` assigned are shared by the trajectories of the worker; all others belong to one trajectory.
"""

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeGuard

from ...core.base.task_groups import first_error
from ..chat.answer import parse_answer
from ..errors import InvalidEnvironment, LimitReached
from ..messages import Query
from ..workflow import Agent, Agents, Message, Prompt, Rewards, Turn
from .patched_turn import as_written

Says = str | Message | Sequence[str | Turn | Message]


class Ask:
    """A prompt with options: ``Ask("Your move: ", stop="\\n", max_new_tokens=8)``. The options are those of
    ``Agent.generate``; ``tools`` stay those of the conversation. ``new``: the prompt begins a new conversation, instead
    of continuing the agent's own."""

    def __init__(self, says: Says, *, new: bool = False, **options: Any) -> None:
        self.says, self.new, self.options = says, new, options


Asked = Mapping[str, Says | Ask]
Follow = Callable[[Mapping[str, Turn]], Mapping[str, Turn]]


class Environment:
    """Derive from this class, define ``reset`` and ``step``, and name the class in ``workflow.py``:
    ``workflow = MyEnvironment``. All methods are ``async``; the class is made without arguments.

    ``reset`` and ``step`` return the agents that speak next, and the text or messages that each gets:
    ``{"solver": "Your move: "}``. All of these turns run at once. An agent's conversation continues by itself: its
    prompt is its last turn, token by token, and the new part. A prompt in which there is a ``Turn`` is taken as it is,
    and so is that of an ``Ask`` with ``new``.

    ``turns`` has all turns of the trajectory so far by agent, and the last one of each by ``turns[agent][-1]``.
    """

    turns: dict[str, list[Turn]]

    replays: ClassVar[bool] = False
    """True if ``reset`` and ``step`` do the same for the same turns: then a tree plays a line again in place of a
    ``fork``."""

    async def setup(self, *_: Any, **data: Any) -> None:
        """Called once in each rollout worker, before its first trajectory, with the config's ``data``: its keys are
        keyword arguments, as those of ``train_query``."""

    @abstractmethod
    async def reset(self, query: Query) -> Asked | Rewards:
        """Begins a trajectory."""
        raise NotImplementedError

    @abstractmethod
    async def step(self, turns: Mapping[str, Turn]) -> Asked | Rewards:
        """Takes the turns of the agents that were asked, by agent. Returns the next prompts, or the rewards, which end
        the trajectory."""
        raise NotImplementedError

    async def truncated(self, limit: LimitReached) -> Rewards:
        """The rewards of a trajectory that a limit of turns or tokens has ended. By default it fails by that error."""
        raise limit

    async def fork(self) -> "Environment":
        """A copy with the same state, for a tree (``rollout.tree``): another object, that shares nothing which ``step``
        changes. ``turns`` need no copy. Called between two steps."""
        raise InvalidEnvironment(f"{type(self).__name__} has no fork")

    async def interim(self) -> Rewards:
        """The rewards of the turns that ``step`` has taken until now, for a tree that compares them. Changes
        nothing."""
        raise InvalidEnvironment(f"{type(self).__name__} has no interim")

    def agrees(self, turn: Turn, action: str) -> bool:
        """True if ``turn`` does the same as the recorded ``action``, for a trajectory that follows a demonstration
        (``rollout.demonstrations``). By default their texts are equal, apart from reasoning and blanks around them, and
        so are their calls of tools. Called before the ``step`` that takes the turn. Changes nothing."""
        return turn.parts.agrees(parse_answer(action))

    async def end(self) -> None:
        """Called at the end of each trajectory, also if it fails, was cancelled or passed its deadline."""

    async def close(self) -> None:
        """Called once in each rollout worker, after its last trajectory, for what ``setup`` has opened; also after a
        ``setup`` that has failed, which may have opened a part of it."""


_CLOSE_S: Final = 1.0
METHODS: Final = ("setup", "reset", "step", "truncated", "fork", "interim", "end", "close")


class Environments:
    """The workflow that an environment's class stands for, and what the trajectories of this worker share."""

    def __init__(self, cls: type[Environment]) -> None:
        self._class = cls
        self._shared: dict[str, Any] = {}
        self._opened: Environment | None = None

    async def setup(self, data: Mapping[str, Any]) -> None:
        """Makes the worker's object and gives its ``setup`` the ``data`` as keyword arguments. Called once, before the
        first trajectory. Raises what that raises, after the object's ``close``."""
        opened = self._opened = self._class()
        before = dict(vars(opened))
        try:
            await opened.setup(**data)
        except BaseException as error:
            await self._close_after(error)
            raise
        missing = object()
        self._shared = {
            name: value for name, value in vars(opened).items() if before.get(name, missing) is not value
        }

    async def close(self) -> None:
        """Closes the worker's object. Does nothing before ``setup``, and nothing at a second call."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()

    async def _close_after(self, error: BaseException) -> None:
        """Closes what ``setup`` opened before it failed with ``error``, which stays the one that counts."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.close()
        except Exception as second:  # noqa: BLE001  # user code
            error.add_note(f"and close, after that: {type(second).__name__}: {second}")

    def new(self) -> Environment:
        """An object for a trajectory, with what ``setup`` assigned."""
        environment = self._class()
        vars(environment).update(self._shared)
        return environment

    async def __call__(self, query: Query, agents: Agents) -> Rewards:
        return await play(self.new(), query, agents)


async def play(
    environment: Environment, query: Query, agents: Agents, follow: Follow | None = None
) -> Rewards:
    """One trajectory. ``environment`` is used for this one alone. ``follow``: gets the turns that the agents have drawn
    together, by agent, and returns those that the environment takes in their place.

    Raises InvalidEnvironment for a result of ``reset`` or ``step`` that is neither prompts nor Rewards, and for an
    environment that has ended; and what the environment and its agents raise.
    """
    environment.turns = {}
    seats: dict[str, Seat] = {}
    try:
        outcome, method = await environment.reset(query), "reset"
        while not isinstance(outcome, Rewards):
            prompts = check_prompts(outcome, environment, method)
            for agent in prompts:
                if agent not in seats:
                    seats[agent] = Seat(agents[agent], environment.turns.setdefault(agent, []))
            turns: Mapping[str, Turn] = await all_turns(seats, prompts)
            if follow is not None:
                turns = follow(turns)
                for agent, turn in turns.items():
                    seats[agent].turns[-1] = turn
            outcome, method = await environment.step(turns), "step"
        return outcome
    except LimitReached as limit:
        return await environment.truncated(limit)
    finally:
        await end(environment)


async def end(environment: Environment) -> None:
    """Ends an environment: it refuses to be used further."""
    vars(environment).update(reset=_refuse(environment, "reset"), step=_refuse(environment, "step"))
    await environment.end()


def _refuse(environment: Environment, method: str) -> Callable[..., Awaitable[Any]]:
    name = f"{type(environment).__name__}.{method}"

    async def refuse(*_: object) -> Any:
        raise InvalidEnvironment(f"{name} after the end of the trajectory: another one needs a new object")

    return refuse


async def all_turns(seats: Mapping[str, "Seat"], prompts: Asked) -> dict[str, Turn]:
    """Returns the turns of the agents asked, at once. The first error cancels the others and is raised by itself."""
    if len(prompts) == 1:
        ((agent, says),) = prompts.items()
        return {agent: await seats[agent].turn(says)}
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            begun = {agent: tasks.create_task(seats[agent].turn(says)) for agent, says in prompts.items()}
    return {agent: task.result() for agent, task in begun.items()}


@dataclass(slots=True)
class Seat:
    """An agent in one trajectory, its turns, and the tools of its conversation."""

    agent: Agent
    turns: list[Turn]
    tools: dict[str, Any] = field(default_factory=dict)

    async def turn(self, says: Says | Ask) -> Turn:
        """The agent's next turn, which is added to ``turns``."""
        ask = says if isinstance(says, Ask) else Ask(says)
        if ask.new or "tools" in ask.options:
            self.tools = {name: value for name, value in ask.options.items() if name == "tools"}
        turn = await self.agent.generate(self._prompt(ask), **(self.tools | ask.options))
        self.turns.append(turn)
        return turn

    def _prompt(self, ask: Ask) -> Prompt:
        says = ask.says
        parts: Sequence[str | Turn | Message] = [says] if isinstance(says, str | Mapping) else list(says)
        if ask.new or not self.turns or any(isinstance(part, Turn) for part in parts):
            return says if isinstance(says, str) else as_written(parts)
        return as_written([self.turns[-1], *parts])


def check_prompts(outcome: object, environment: Environment, method: str) -> Asked:
    """Returns the prompts that ``method`` returned. Raises InvalidEnvironment for another result."""
    name = f"{type(environment).__name__}.{method}"
    if not _is_asked(outcome):
        raise InvalidEnvironment(
            f"{name} returned {type(outcome).__name__}: needs prompts by agent, or Rewards"
        )
    if not outcome:
        raise InvalidEnvironment(f"{name} returned no prompt: needs at least one, or Rewards")
    return outcome


def _is_asked(outcome: object) -> TypeGuard[Asked]:
    return isinstance(outcome, Mapping)


def environment_problems(cls: type[Any]) -> list[str]:
    """The mistakes of a class that is to be an environment, for the author of the recipe to read."""
    if not issubclass(cls, Environment):
        return [f"{cls.__name__} is a class, and not derived from flexmarl.actors.Environment"]
    problems = [problem for name in METHODS if (problem := _method_problem(cls, name)) is not None]
    problems += [
        f"{cls.__name__}.{name} is missing"
        for name in dir(cls)
        if name not in METHODS and _is_missing(cls, name)
    ]
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        problems.append(f"{cls.__name__} is made without arguments: {error}")
    for name, value in _own_attributes(cls).items():
        if isinstance(value, list | dict | set | bytearray):
            problems.append(
                f"{cls.__name__}.{name} is one {type(value).__name__} for all trajectories: assign it in reset, or in "
                "setup if it is shared"
            )
        if name == "__slots__":
            problems.append(f"{cls.__name__} has __slots__: what setup assigns would not be shared")
    return problems


def _is_missing(cls: type[Environment], name: str) -> bool:
    return getattr(getattr(cls, name, None), "__isabstractmethod__", False)


def _method_problem(cls: type[Environment], name: str) -> str | None:
    method = getattr(cls, name)
    full = f"{cls.__name__}.{name}"
    if _is_missing(cls, name):
        return f"{full} is missing: write `async def {_FORMS[name]}`"
    if not inspect.iscoroutinefunction(inspect.unwrap(method)):
        return f"{full} is not async: write `async def {_FORMS[name]}`"
    if name != "setup":  # its arguments are those of `data`
        arguments = [None] * (2 if name in ("reset", "step", "truncated") else 1)
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            return f"{full}: {error}: write `async def {_FORMS[name]}`"
    return None


_FORMS: Final = {
    "setup": "setup(self, **data)",
    "reset": "reset(self, query)",
    "step": "step(self, turns)",
    "truncated": "truncated(self, limit)",
    "fork": "fork(self)",
    "interim": "interim(self)",
    "end": "end(self)",
    "close": "close(self)",
}


def _own_attributes(cls: type[Environment]) -> dict[str, Any]:
    """The attributes of ``cls`` and its bases below Environment, apart from those that Python makes."""
    attributes: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base is not Environment and issubclass(base, Environment):
            attributes |= {
                name: value
                for name, value in vars(base).items()
                if name == "__slots__" or not name.startswith("__")
            }
    return attributes
