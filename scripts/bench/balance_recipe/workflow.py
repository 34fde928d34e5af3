"""The recipe of ``scripts/bench/run balance``: 25 calls per trajectory, 19 of them (76 %) to one agent.

Twice: a plan, then its parts worked out at once (10 and 9), then a critic and a writer.
"""

import asyncio
from collections.abc import Sequence

from flexmarl.actors.messages.rollouts import Query
from flexmarl.actors.workflow import Agents, Rewards

PARTS = (10, 9)


async def workflow(query: Query, agents: Agents) -> Rewards:
    text = query.text
    for count in PARTS:
        plan = await agents["planner"].generate(text)
        parts = (agents["worker"].generate([plan, f"part {part}"]) for part in range(count))
        done = await asyncio.gather(*parts)
        remark = await agents["critic"].generate(" ".join(part.text[:40] for part in done))
        text = (await agents["writer"].generate([f"{remark.text[:40]} {plan.text[:40]}"])).text[:80]
    return Rewards(planner=1.0, worker=1.0, critic=1.0, writer=1.0)


def train_query(position: int, seed: int) -> Query:
    return Query(f"q{position}", f"task {seed} {position}")


def eval_queries(seed: int) -> Sequence[Query]:
    return []
