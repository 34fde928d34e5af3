"""Each trajectory is a program that knows nothing of the run. Queries have the faults of ``data.faults`` in turn."""

import sys
from collections.abc import Sequence
from pathlib import Path

from flexmarl.actors.gateway.gateway import open_gateway
from flexmarl.actors.workflow import Agents, Query, Rewards

PROGRAM = Path(__file__).with_name("program.py")


async def workflow(query: Query, agents: Agents) -> Rewards:
    fault = query.data["fault"]
    command = [sys.executable, str(PROGRAM), query.text, *([fault] if fault else [])]
    async with open_gateway(agents, train=query.data["train"]) as gateway:
        end = await gateway.run(command, timeout_s=0.5 if fault == "hangs" else None)
    rewards = gateway.rewards(end)
    rewards.metrics |= {kind: float(number) for kind, number in gateway.counts.items()}
    rewards.metrics["turns"] = float(len(gateway.turns))
    return rewards


def train_query(position: int, seed: int, faults: Sequence[str] = (), train: str = "all") -> Query:
    fault = faults[position % len(faults)] if faults else ""
    return Query(f"q{position}", f"task {seed} {position}", {"fault": fault, "train": train})


def eval_queries(seed: int, faults: Sequence[str] = (), train: str = "all") -> Sequence[Query]:
    return []
