"""The race's task, one for both sides: write digits. `reward` is the very function that TRL is given too."""

import random
from collections.abc import Sequence

from flexmarl.actors.messages.rollouts import Query
from flexmarl.actors.workflow import Agents, Rewards


async def workflow(query: Query, agents: Agents) -> Rewards:
    turn = await agents["racer"].generate(query.text)
    return Rewards(racer=reward(turn.text))


def reward(completion: str) -> float:
    """The share of digits among the completion's characters, later ones weighing a little more.

    The weights make equal rewards within a group rare, so that every sample has a gradient on both sides.
    """
    earned = sum(1 + place / 100 for place, character in enumerate(completion) if character.isdigit())
    return earned / sum(1 + place / 100 for place in range(len(completion)))


def train_query(position: int, seed: int) -> Query:
    """Eight tokens always, so that neither side pads a prompt."""
    letters = random.Random(f"{seed} {position}").choices("abcdefghijklmnopqrstuvwxyz", k=7)
    return Query(f"q{position:06d}", "".join(letters) + "=")


def eval_queries(seed: int) -> Sequence[Query]:
    """The least possible number: an evaluation is not part of the race."""
    return [train_query(999_999, seed)]
