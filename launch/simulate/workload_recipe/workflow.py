"""The recipe that plays a workload: calls with prompts of drawn lengths, and times of the environment between them.

The first prompts of a group are of equal length, as those of one query are. All later draws are of the trajectory's
own: they are seeded by the name of its last turn.
"""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from flexmarl.actors.workflow import Agents, Query, Rewards
from flexmarl.launch.simulate.query_order import QueryOrder
from flexmarl.launch.simulate.worker_time import WorkerTime

_order = QueryOrder()
_worker_time = WorkerTime()


async def workflow(query: Query, agents: Agents) -> Rewards:
    workload: Mapping[str, Any] = query.data["workload"]
    async with _order.place(query.id, workload["queries_at_once"]):
        return await _play(query, agents, workload)


async def _play(query: Query, agents: Agents, workload: Mapping[str, Any]) -> Rewards:
    place = query.id
    for stage in workload["calls"]:
        branches = [
            asyncio.create_task(_calls(call, f"{place}/{branch}", agents, workload))
            for branch, call in enumerate(stage)
        ]
        try:
            names = await asyncio.gather(*branches)
        finally:  # after an error of one, ``gather`` leaves the others running
            for branch in branches:
                branch.cancel()
        place = next((name for name in names if name), place)
    draw = random.Random(place)
    await _delay(workload["reward"], draw)
    # Of different sizes: a group with equal rewards would not be trained.
    return Rewards().of_team(draw.random())


async def _calls(call: Mapping[str, Any], place: str, agents: Agents, workload: Mapping[str, Any]) -> str:
    """The name of the last turn; empty if the call is not made."""
    draw = random.Random(place)
    if draw.random() >= call["chance"]:
        return ""
    prompt, name = workload["agents"][call["agent"]]["prompt"], place
    for _ in range(call["times"]):
        length = min(prompt["longest"], max(1, round(_lognormal(prompt["median"], prompt["sigma"], draw))))
        await _worker_time.take(workload["turn_s"])
        turn = await agents[call["agent"]].generate("x" * length)
        name, draw = turn.sample_id, random.Random(turn.sample_id)
        await _delay(workload["environment"], draw)
    return name


async def _delay(delay: Mapping[str, Any] | None, draw: random.Random) -> None:
    if delay is not None:
        await asyncio.sleep(_lognormal(delay["median_s"], delay["sigma"], draw))


def _lognormal(median: float, sigma: float, draw: random.Random) -> float:
    return median * math.exp(sigma * draw.gauss(0.0, 1.0))


def train_query(position: int, seed: int, workload: Mapping[str, Any]) -> Query:
    """Query number ``position``."""
    return Query(f"q{position:06}", f"task {seed} {position}", {"workload": workload})


def eval_queries(seed: int, workload: Mapping[str, Any]) -> Sequence[Query]:
    """An empty list: a simulated policy learns nothing, so that no evaluation says anything about it."""
    return []
