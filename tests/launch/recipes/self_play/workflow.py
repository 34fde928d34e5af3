"""Both sides say something, and the longer answer wins: a zero-sum game."""

import asyncio
from collections.abc import Sequence

from flexmarl.actors.workflow import Agents, Query, Rewards


async def workflow(query: Query, agents: Agents) -> Rewards:
    mine, theirs = await asyncio.gather(*(agents[name].generate(query.text) for name in ("player", "rival")))
    won = float((len(mine.tokens) > len(theirs.tokens)) - (len(mine.tokens) < len(theirs.tokens)))
    return Rewards(player=won, rival=-won, metrics={"rival_version": theirs.version})


def train_query(position: int, seed: int) -> Query:
    return Query(f"q{position}", f"task {seed} {position}")


def eval_queries(seed: int) -> Sequence[Query]:
    return [Query(f"e{number}", f"test {seed} {number}") for number in range(3)]
