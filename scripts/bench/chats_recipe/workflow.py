"""One answer; the time that it takes to generate is written beside it."""

import time

from flexmarl.actors import Query
from flexmarl.actors.workflow import Agents


async def workflow(query: Query, agents: Agents) -> None:
    began = time.monotonic()
    turn = await agents["assistant"].generate(query.text)
    turn.write(engine_s=time.monotonic() - began)


def train_query(position: int, seed: int) -> Query:
    return Query(f"drawn-{position}", f"Question {position}: ")


def eval_queries(seed: int) -> list[Query]:
    return []
