"""The recipe of ``scripts/bench/run slots extra_queries``: four answers at once, of lengths that the query gives."""

import asyncio
from collections.abc import Sequence
from random import Random

from flexmarl.actors.workflow import Agents, Query, Rewards

ANSWERS = 4


async def workflow(query: Query, agents: Agents) -> Rewards:
    # Seeds of the query: all runs of a seed have the same answers to it, in any step.
    answers = (agents["solver"].generate(query.text, seed=seed) for seed in query.data["seeds"])
    return Rewards(solver=float(max(len(turn.tokens) for turn in await asyncio.gather(*answers))))


def train_query(position: int, seed: int) -> Query:
    random = Random(f"{seed} {position}")
    seeds = [random.getrandbits(62) for _ in range(ANSWERS)]
    return Query(f"q{position}", f"task {seed} {position}", {"seeds": seeds})


def eval_queries(seed: int) -> Sequence[Query]:
    return []
