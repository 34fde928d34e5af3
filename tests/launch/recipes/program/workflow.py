"""Each trajectory is a program that knows nothing of the run."""

import sys
from collections.abc import Sequence
from pathlib import Path

from flexmarl.actors.gateway.gateway import open_gateway
from flexmarl.actors.workflow import Agents, Query, Rewards

PROGRAM = Path(__file__).with_name("program.py")


async def workflow(query: Query, agents: Agents) -> Rewards:
    async with open_gateway(agents) as gateway:
        end = await gateway.run([sys.executable, str(PROGRAM), query.text], timeout_s=120)
    end.check()
    counts = {kind: float(number) for kind, number in gateway.counts.items()}
    return Rewards(solver=1.0, checker=0.5, metrics={**counts, "turns": float(len(gateway.turns))})


def train_query(position: int, seed: int) -> Query:
    return Query(f"q{position}", f"task {seed} {position}")


def eval_queries(seed: int) -> Sequence[Query]:
    return []
