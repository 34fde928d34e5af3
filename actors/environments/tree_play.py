"""Trajectories that branch: several turns answer one prompt, and copies of the environment take them.

    reset ─> [line] ─> candidates of all lines at once ─> a copy takes each ─> the rule keeps lines ─> ... ─> line ends

All lines of a tree are played together, a round after the other: a turn's place among the calls, from which its
``sample_id`` and its seed follow, depends on no order of arrival, and a tree that begins again is the same. The price
is that each round waits for its longest turn.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, Final, TypeVar

from ...core.base.task_groups import first_error
from ..errors import InvalidEnvironment, LimitReached
from ..messages import Query
from ..trees.branch_rule import BranchRule, Candidate, TreePlace
from ..trees.success_model import PrefixEnd, SuccessModel, prefix_features
from ..workflow import Agents, Rewards, Turn
from .environment import Ask, Asked, Environment, Says, Seat, all_turns, check_prompts, end

_TOLERANCE: Final = 1e-9
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LineEnd:
    """``rewards``: at the line's end. ``sample_ids``: of its turns. ``was_cut``: the rule kept other candidates, and
    the rewards are those until then. ``prefixes``: of its rounds, for a rule that predicts."""

    rewards: Rewards
    sample_ids: frozenset[str]
    was_cut: bool = False
    prefixes: tuple["Prefix", ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A place of a line before a round; lines that part later have the same object. ``features``: for the predictor.
    ``success``: as it has predicted. ``price``: of a candidate in this step."""

    features: tuple[int, ...]
    success: float
    price: float = 1.0


_UNKNOWN: Final = Prefix((), 0.5)
"""The prefixes of a rule that does not predict."""


@dataclass(frozen=True, slots=True)
class TreeEnd:
    """``ends``: of all lines whose rewards count, one at least that was not cut. ``places``: by sample id, of all
    turns. ``nodes``: the points with several candidates. ``cut_lines``: lines that the rule has ended.
    ``prefixes``: of the lines to an end, for the predictor to learn from."""

    ends: tuple[LineEnd, ...]
    places: Mapping[str, TreePlace]
    nodes: int
    cut_lines: int
    prefixes: tuple[PrefixEnd, ...] = ()


def branch_problem(cls: type[Environment] | None, rule: BranchRule) -> str | None:
    """The reason for which ``rule`` can't play this class, in words; None if it can. ``cls``: None for a workflow that
    is a function."""
    if cls is None:
        return (
            "rollout.tree needs an environment: the workflow is a function, which can't be copied between two turns. "
            "Write a class derived from flexmarl.actors.Environment with `async def fork(self)`, or leave "
            "rollout.tree out"
        )
    if cls.fork is Environment.fork and not cls.replays:
        return (
            f"rollout.tree: {cls.__name__} can't branch: define `async def fork(self)`, which returns a copy, or write "
            "`replays = True` in the class if the same turns always give the same prompts and rewards"
        )
    if rule.compares_rewards and cls.interim is Environment.interim:
        return (
            f"rollout.tree: {cls.__name__} has no `async def interim(self)`, the rewards of the turns so far, by which "
            "this branch rule compares candidates"
        )
    return None


async def play_tree(
    new: Callable[[], Environment],
    query: Query,
    agents: Agents,
    rule: BranchRule,
    model: SuccessModel | None = None,
) -> TreeEnd:
    """One trajectory as a tree. ``new``: makes an environment. ``model``: for a rule that predicts; None if it
    has learnt nothing yet.

    Raises InvalidEnvironment as ``play``, for a replay that asks for something else, and for a turn that the rule
    compares and that has no reward, or gets another one later; and what the environments and agents raise.
    """
    tree = _Tree(new, query, agents, rule, model or SuccessModel())
    try:
        return await tree.play()
    finally:
        await tree.close()


@dataclass(slots=True)
class _Line:
    """``outcome``: of the last ``reset`` or ``step``, whose name is ``method``. ``prompts`` and ``rounds``: the prompts
    so far, and the turns that answered. ``paid``: by sample id, the rewards by which its turns were compared.
    ``candidate``: the last round. ``interim``: the rewards until now, if the rule compares them."""

    environment: Environment
    outcome: Asked | Rewards
    method: str = "reset"
    seats: dict[str, Seat] = field(default_factory=dict)
    prompts: tuple[Asked, ...] = ()
    rounds: tuple[Mapping[str, Turn], ...] = ()
    past: tuple[float, ...] = ()
    node: int = -1
    ordinals: Mapping[str, int] = field(default_factory=dict)
    paid: Mapping[str, float] = field(default_factory=dict)
    prefixes: tuple[Prefix, ...] = ()
    candidate: Candidate = field(default_factory=partial(Candidate, ()))
    interim: Rewards = field(default_factory=Rewards)

    @property
    def sample_ids(self) -> frozenset[str]:
        return frozenset(turn.sample_id for turns in self.rounds for turn in turns.values())


@dataclass(slots=True)
class _Try:
    """A candidate: the seats of its agents, the confidences of its line, and its turns once these have ended.
    ``prefix``: that of its prompts, for a rule that predicts."""

    seats: dict[str, Seat]
    past: tuple[float, ...]
    prefix: Prefix
    turns: dict[str, Turn] = field(default_factory=dict)

    async def draw(self, prompts: Asked) -> None:
        self.turns = await all_turns(self.seats, prompts)

    @property
    def candidate(self) -> Candidate:
        logprobs = tuple(number for turn in self.turns.values() for number in turn.logprobs)
        return Candidate(logprobs, self.past, success=self.prefix.success, price=self.prefix.price)


class _Tree:
    """The lines of a tree and the environments that are open. It is one class because an environment is ended wherever
    its line ends: cut, done, or given up with all others."""

    def __init__(
        self,
        new: Callable[[], Environment],
        query: Query,
        agents: Agents,
        rule: BranchRule,
        model: SuccessModel,
    ) -> None:
        self._new, self._query, self._agents, self._rule, self._model = new, query, agents, rule, model
        self._open: list[Environment] = []
        self._ends: list[LineEnd] = []
        self._places: dict[str, TreePlace] = {}
        self._nodes = 0
        self._cut_lines = 0

    async def play(self) -> TreeEnd:
        """Plays until all lines have ended."""
        root = self._register(self._new())
        lines = [_Line(root, await root.reset(self._query))]
        try:
            while lines := [line for line in lines if not await self._has_ended(line)]:
                lines = await self._round(lines)
        except LimitReached as limit:
            for line in lines:
                await self._finish(line, await line.environment.truncated(limit))
        ends = [line for line in self._ends if self._rule.compares_rewards or not line.was_cut]
        prefixes = _prefix_ends([end for end in ends if not end.was_cut], self._rule)
        return TreeEnd(tuple(ends), self._places, self._nodes, self._cut_lines, prefixes)

    async def close(self) -> None:
        """Ends the environments that are open. Raises the first error of theirs, when all have ended."""
        errors: list[BaseException] = []
        while self._open:
            try:
                await end(self._open.pop())
            except Exception as error:  # noqa: BLE001  # user code; the others have to end too
                errors.append(error)
        if errors:
            raise errors[0]

    def _register(self, environment: Environment) -> Environment:
        environment.turns = {}
        self._open.append(environment)
        return environment

    async def _has_ended(self, line: _Line) -> bool:
        if not isinstance(line.outcome, Rewards):
            return False
        await self._finish(line, line.outcome)
        return True

    async def _finish(self, line: _Line, rewards: Rewards, *, was_cut: bool = False) -> None:
        final = _of_turns(rewards)
        for sample_id, amount in line.paid.items():
            if abs(final.get(sample_id, 0.0) - amount) > _TOLERANCE * max(1.0, abs(amount)):
                raise InvalidEnvironment(
                    f"{type(line.environment).__name__}: turn {sample_id} was compared by its reward {amount:g}, and "
                    f"has {final.get(sample_id, 0.0):g} in the end: a reward that interim has given must stay"
                )
        self._ends.append(LineEnd(rewards, line.sample_ids, was_cut, line.prefixes))
        self._cut_lines += was_cut
        self._open.remove(line.environment)
        await end(line.environment)

    async def _round(self, lines: Sequence[_Line]) -> list[_Line]:
        """The lines after a round; those that the rule cuts have ended."""
        tries = await self._candidates(lines)
        # Numbered here, not when a copy has been made: the numbers are the same whichever is ready first.
        nodes = [
            self._node() if len(line_tries) > 1 else line.node
            for line, line_tries in zip(lines, tries, strict=True)
        ]
        grown = await _together(map(self._children, lines, tries, nodes))
        return [child for children in grown for child in await self._keep_lines(children)]

    def _node(self) -> int:
        self._nodes += 1
        return self._nodes - 1

    async def _candidates(self, lines: Sequence[_Line]) -> list[list[_Try]]:
        """The candidates of each line, with their turns. All lines draw at once, as often as the rule asks for more."""
        of_lines = [check_prompts(line.outcome, line.environment, line.method) for line in lines]
        prefixes = [*map(self._prefix, lines, of_lines)]
        tries: list[list[_Try]] = [[] for _ in lines]
        # Those that are least certain come first: they get the room.
        order = sorted(range(len(lines)), key=lambda place: abs(prefixes[place].success - 0.5))
        room = max(0, self._rule.most_lines - len(lines))
        while True:
            begun: list[tuple[_Try, Asked]] = []
            for place in order:
                line, prompts, line_tries = lines[place], of_lines[place], tries[place]
                seen = [attempt.candidate for attempt in line_tries]
                more = max(0, self._rule.candidates(seen, room) - len(seen))
                room -= more if seen else more - 1
                fresh = [_Try(self._seats(line, prompts), line.past, prefixes[place]) for _ in range(more)]
                line_tries += fresh
                begun += [(attempt, prompts) for attempt in fresh]
            if not begun:
                return tries
            await _together(attempt.draw(prompts) for attempt, prompts in begun)

    def _prefix(self, line: _Line, prompts: Asked) -> Prefix:
        if not self._rule.predicts:
            return _UNKNOWN
        texts = {
            agent: _text_of(says.says if isinstance(says, Ask) else says) for agent, says in prompts.items()
        }
        features = prefix_features(texts, len(line.rounds))
        return Prefix(features, self._model.predict(features), self._model.price)

    def _seats(self, line: _Line, prompts: Asked) -> dict[str, Seat]:
        """Copies of the line's seats, with those of agents that are asked for the first time."""
        seats = {
            agent: replace(seat, turns=[*seat.turns], tools={**seat.tools})
            for agent, seat in line.seats.items()
        }
        return seats | {agent: Seat(self._agents[agent], []) for agent in prompts if agent not in seats}

    async def _children(self, line: _Line, tries: Sequence[_Try], node: int) -> list[_Line]:
        """The lines behind the candidates; the last one has the environment of ``line``. All copies are made before the
        first step."""
        environments = [await self._copy(line) for _ in tries[1:]]
        return await _together(
            self._child(line, attempt, environment, node)
            for attempt, environment in zip(tries, [*environments, line.environment], strict=True)
        )

    async def _child(self, line: _Line, attempt: _Try, environment: Environment, node: int) -> _Line:
        environment.turns = {agent: seat.turns for agent, seat in attempt.seats.items()}
        ordinals = Counter(line.ordinals if node == line.node else ())
        for agent, turn in attempt.turns.items():
            self._places[turn.sample_id] = TreePlace(node, ordinals[agent])
            ordinals[agent] += 1
        outcome = await environment.step(attempt.turns)
        child = _Line(
            environment,
            outcome,
            "step",
            attempt.seats,
            (*line.prompts, check_prompts(line.outcome, environment, line.method)),
            (*line.rounds, attempt.turns),
            (*line.past, attempt.candidate.confidence),
            node,
            ordinals,
            line.paid,
            (*line.prefixes, attempt.prefix) if self._rule.predicts else (),
        )
        child.candidate = attempt.candidate
        if self._rule.compares_rewards:
            await self._pay(child, attempt.turns.values())
        return child

    async def _pay(self, line: _Line, turns: Collection[Turn]) -> None:
        """Notes the rewards of the line's last turns. Raises InvalidEnvironment if one has none."""
        name = type(line.environment).__name__
        outcome = line.outcome
        line.interim = outcome if isinstance(outcome, Rewards) else await line.environment.interim()
        amounts = _of_turns(line.interim)
        if missing := [turn for turn in turns if turn.sample_id not in amounts]:
            raise InvalidEnvironment(
                f"{name}: turn {missing[0].sample_id} of {missing[0].agent} has no reward when a step has taken it, "
                f"and rollout.tree compares candidates by their rewards: give it one in {name}.interim"
            )
        round_paid = {turn.sample_id: amounts[turn.sample_id] for turn in turns}
        line.paid = {**line.paid, **round_paid}
        line.candidate = replace(line.candidate, reward=math.fsum(round_paid.values()))

    async def _keep_lines(self, children: Sequence[_Line]) -> list[_Line]:
        """The lines of a branch point that the rule keeps; the others are ended."""
        places = self._rule.kept([child.candidate for child in children])
        kept: list[_Line] = []
        for place, child in enumerate(children):
            # A line at its end costs no further turn: there is nothing to gain by its cut.
            is_done = isinstance(child.outcome, Rewards) and not self._rule.compares_rewards
            if place in places or is_done:
                kept.append(child)
            else:
                await self._finish(child, child.interim, was_cut=True)
        return kept

    async def _copy(self, line: _Line) -> Environment:
        original = line.environment
        if type(original).fork is Environment.fork:
            return await self._replay(line)
        copied: object = await original.fork()
        name = f"{type(original).__name__}.fork"
        if not isinstance(copied, Environment):
            raise InvalidEnvironment(
                f"{name} returned {type(copied).__name__}: needs a copy of the environment"
            )
        if any(copied is environment for environment in self._open):
            raise InvalidEnvironment(f"{name} returned an environment that is in use: needs a copy")
        return self._register(copied)

    async def _replay(self, line: _Line) -> Environment:
        """Another environment with the turns of the line. Raises InvalidEnvironment if its prompts are others."""
        environment = self._register(self._new())
        outcome = await environment.reset(self._query)
        for number, (prompts, turns) in enumerate(zip(line.prompts, line.rounds, strict=True)):
            _check_replay(environment, outcome, prompts, number)
            for agent, turn in turns.items():
                environment.turns.setdefault(agent, []).append(turn)
            outcome = await environment.step(turns)
        _check_replay(environment, outcome, line.outcome, len(line.rounds))
        return environment


def _check_replay(environment: Environment, outcome: object, prompts: Asked | Rewards, rounds: int) -> None:
    # Prompts alone: options may hold methods of the two objects, which are never equal.
    if (
        not isinstance(outcome, Mapping)
        or isinstance(prompts, Rewards)
        or _prompts_of(outcome) != _prompts_of(prompts)
    ):
        name = type(environment).__name__
        raise InvalidEnvironment(
            f"{name} asks for something else after the same {rounds} rounds: `replays = True` is for environments "
            f"whose prompts follow from the query and the turns; define {name}.fork"
        )


def _prompts_of(prompts: Asked) -> dict[str, object]:
    return {
        agent: (says.says, says.new) if isinstance(says, Ask) else (says, False)
        for agent, says in prompts.items()
    }


def _text_of(says: Says) -> str:
    """The text of a prompt, for the features of a prefix."""
    parts = [says] if isinstance(says, str | Mapping) else says
    return "\n".join(
        part
        if isinstance(part, str)
        else part.text
        if isinstance(part, Turn)
        else str(part.get("content", ""))
        for part in parts
    )


def _prefix_ends(ends: Sequence[LineEnd], rule: BranchRule) -> tuple[PrefixEnd, ...]:
    """The prefixes of lines to an end, in the order of their first line, each with the share that succeeded."""
    successes: dict[Prefix, list[float]] = {}
    for line_end in ends:
        for prefix in line_end.prefixes:
            successes.setdefault(prefix, []).append(rule.success_of(line_end.rewards))
    roots = {line_end.prefixes[0] for line_end in ends if line_end.prefixes}
    excess = rule.excess(len(ends))
    return tuple(
        PrefixEnd(prefix.features, fmean(values), len(values), excess if prefix in roots else None)
        for prefix, values in successes.items()
    )


def _of_turns(rewards: Rewards) -> dict[str, float]:
    """By sample id: the sum of the rewards that a turn was given."""
    sums: dict[str, float] = {}
    for turn, amount in rewards.turns:
        sums[turn.sample_id] = sums.get(turn.sample_id, 0.0) + amount
    return sums


async def _together(works: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """The results in order. The first error cancels the others and is raised by itself."""
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in works]
    return [task.result() for task in running]
