"""The recipe of ``scripts/bench/run pipeline``: per trajectory one call of a planner, two of solvers, six of checkers.

Plans are made first; both solutions follow at once; each of them is checked three times at once.
"""

import asyncio
from collections.abc import Sequence

from flexmarl.actors.messages.rollouts import Query
from flexmarl.actors.workflow import Agents, Rewards, Turn

SOLUTIONS = 2
CHECKS = 3


async def workflow(query: Query, agents: Agents) -> Rewards:
    plan = await agents["planner"].generate(query.text)
    answers = await asyncio.gather(*(_solve(agents, plan) for _ in range(SOLUTIONS)))
    longest = float(max(len(answer.tokens) for answer in answers))
    return Rewards(planner=longest, solver=longest, checker=float(len(plan.tokens)))


async def _solve(agents: Agents, plan: Turn) -> Turn:
    solution = await agents["solver"].generate([plan, "solve"])
    await asyncio.gather(*(agents["checker"].generate([solution, "check"]) for _ in range(CHECKS)))
    return solution


def train_query(position: int, seed: int) -> Query:
    return Query(f"q{position}", f"task {seed} {position}")


def eval_queries(seed: int) -> Sequence[Query]:
    return []
