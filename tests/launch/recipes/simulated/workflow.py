"""Per trajectory one call of a solver and then one of a checker.

environment_s    of ``data``: seconds between the two calls
reward_s         seconds behind them
"""

import asyncio
from collections.abc import Sequence

from flexmarl.actors.workflow import Agents, Query, Rewards


async def workflow(query: Query, agents: Agents) -> Rewards:
    draft = await agents["solver"].generate(query.text)
    await asyncio.sleep(query.data.get("environment_s", 0.0))
    final = await agents["checker"].generate([draft, "check"])
    await asyncio.sleep(query.data.get("reward_s", 0.0))
    return Rewards(solver=float(len(draft.tokens)), checker=float(len(final.tokens)))


def train_query(position: int, seed: int, **data: float) -> Query:
    return Query(f"q{position}", f"task {seed} {position}", data)


def eval_queries(seed: int, **data: float) -> Sequence[Query]:
    return []
