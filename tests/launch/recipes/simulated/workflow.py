"""Per trajectory one call of a solver and then one of a checker."""

from collections.abc import Sequence

from flexmarl.actors.workflow import Agents, Query, Rewards


async def workflow(query: Query, agents: Agents) -> Rewards:
    draft = await agents["solver"].generate(query.text)
    final = await agents["checker"].generate([draft, "check"])
    return Rewards(solver=float(len(draft.tokens)), checker=float(len(final.tokens)))


def train_query(position: int, seed: int) -> Query:
    return Query(f"q{position}", f"task {seed} {position}")


def eval_queries(seed: int) -> Sequence[Query]:
    return []
