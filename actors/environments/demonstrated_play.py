"""Trajectories that follow a demonstration: semi-online reinforcement learning.

    prompts ─> turns of the agents ─┬─ agree with the recorded actions ───────────────> step ─> the next prompts
                                    └─ depart ─┬─ patched: the recorded actions ──────> step
                                               └─ the rule patches no more ─> the trajectory ends

The policy's turns are drawn as ever, each at a state of the demonstration, and all of them are samples of the version
that drew them, also those that were patched. A recorded action is a part of later prompts alone, and never trained: so
``strict`` keeps its promise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import xxhash

from ..demonstrations.demonstration import Demonstration
from ..demonstrations.patch_rule import Departure, PatchRule, match_returns
from ..errors import InvalidEnvironment
from ..figures import Numbers
from ..messages import Query
from ..workflow import Agents, Rewards, Turn
from .environment import Environment, play
from .patched_turn import patch_turn

_DRAWS: Final = 2.0**53
"""As many as a float has bits for: the greatest is less than 1."""


@dataclass(frozen=True, slots=True)
class DemonstratedEnd:
    """``rewards``: by the agreement with the demonstration. ``figures``: of the step, by their names in
    ``figures.py``."""

    rewards: Rewards
    figures: Numbers


def follow_problem(cls: type[Environment] | None) -> str | None:
    """The reason for which a workflow can't follow a demonstration, in words; None if it can. ``cls``: None for a
    workflow that is a function."""
    if cls is None:
        return (
            "rollout.demonstrations needs an environment: the workflow is a function, whose turns can't be replaced. "
            "Write a class derived from flexmarl.actors.Environment, or leave rollout.demonstrations out"
        )
    return None


async def play_demonstrated(
    environment: Environment, query: Query, agents: Agents, demonstration: Demonstration, rule: PatchRule
) -> DemonstratedEnd:
    """One trajectory along ``demonstration``. ``environment`` is used for this one alone.

    An agent's reward is the share of its recorded actions that its turns agree with, and a turn's is its return by
    ``match_returns`` (UI-S1, Lu et al., arXiv 2509.11543: advantages of the episode and of the step, with weight 1).
    Rewards of the environment are not used, since it pays recorded actions too. Assumed: a turn agrees or does not,
    where the paper also pays the form and the type of an action; an agent's returns are those of its own turns; the
    episode's reward is the share. Raises as ``play``, and InvalidEnvironment for a turn beyond the recorded ones.
    """
    follower = _Follower(environment, demonstration, rule)
    try:
        returned = await play(environment, query, agents, follower.take)
    except _Departed:
        return follower.end(departed=True)
    return follower.end(departed=False, left_out=returned.left_out)


class _Departed(Exception):
    """A departure ends the trajectory."""


class _Follower:
    """A trajectory's place in its demonstration."""

    def __init__(self, environment: Environment, demonstration: Demonstration, rule: PatchRule) -> None:
        self._environment, self._demonstration, self._rule = environment, demonstration, rule
        self._drawn: dict[str, list[tuple[Turn, bool]]] = {}
        """By agent: its turns as they were drawn, and if they agree."""
        self._patches = 0
        self._followed: int | None = None
        """The number of turns before the first departure, once there was one."""

    def take(self, turns: Mapping[str, Turn]) -> dict[str, Turn]:
        """The turns that the environment takes, of the agents that were asked at once. Raises _Departed."""
        moves: dict[str, Turn] = {}
        ends = False
        before = sum(map(len, self._drawn.values()))
        for agent, turn in turns.items():
            action = self._action(agent)
            agrees = bool(self._environment.agrees(turn, action))
            self._drawn.setdefault(agent, []).append((turn, agrees))
            if agrees:
                moves[agent] = turn
                continue
            if self._followed is None:
                self._followed = before
            if self._rule.patches(Departure(self._patches, _draw_of(turn))):
                self._patches += 1
                moves[agent] = patch_turn(turn, action)
            else:
                ends = True
        if ends:
            raise _Departed
        return moves

    def _action(self, agent: str) -> str:
        actions = self._demonstration.actions.get(agent, ())
        number = len(self._drawn.get(agent, ()))
        if number >= len(actions):
            raise InvalidEnvironment(
                f"{type(self._environment).__name__} asks for turn {number + 1} of agent {agent!r}, and the "
                f"demonstration of the query has {len(actions)} actions of it ({self._demonstration.place}): "
                "record it with the recipe and the data of the run, to its end"
            )
        return actions[number]

    def end(self, *, departed: bool, left_out: list[Turn] | None = None) -> DemonstratedEnd:
        """The rewards and figures of the trajectory until now. ``left_out``: turns that the environment leaves out."""
        actions = self._demonstration.actions
        count = sum(map(len, self._drawn.values()))
        followed = count if self._followed is None else self._followed
        rewards = Rewards(metrics={"followed": followed / sum(map(len, actions.values()))})
        for agent, drawn in self._drawn.items():
            matches = [agrees for _, agrees in drawn]
            rewards.by_agent[agent] = sum(matches) / len(actions[agent])
            for (turn, _), amount in zip(drawn, match_returns(matches, self._rule.decay), strict=True):
                rewards.of(turn, amount)
        rewards.left_out = left_out or []
        figures: Numbers = {
            "demonstrated_trajectories": 1,
            "patched_turns": self._patches,
            "departed_trajectories": int(departed),
        }
        return DemonstratedEnd(rewards, figures)


def _draw_of(turn: Turn) -> float:
    return (xxhash.xxh3_64_intdigest(f"patch {turn.sample_id}".encode()) >> 11) / _DRAWS
