"""The recipe of ``scripts/bench/run slots extra_queries``: one turn, rewarded by its length."""

from collections.abc import Sequence

from flexmarl.actors.workflow import Agents, Query, Rewards


async def workflow(query: Query, agents: Agents) -> Rewards:
    turn = await agents["solver"].generate(query.text)
    return Rewards(solver=float(len(turn.tokens)))


def train_query(position: int, seed: int) -> Query:
    return Query(f"q{position}", f"task {seed} {position}")


def eval_queries(seed: int) -> Sequence[Query]:
    return []
