"""A workflow that stands still in the way that a test asks for.

The config's ``data`` says how: ``hang``, one of the names below. Training trajectories hang from the query at position
``since`` on, so that some steps are trained before.
"""

import asyncio
import time
from collections import Counter
from typing import Any

from flexmarl.actors import Query, Rewards, compute_reward, in_process

_lock = asyncio.Lock()
_begun: Counter[str] = Counter()
_hang = ""


def _compute_for_ever() -> None:
    time.sleep(3600.0)


async def _wait_for_ever() -> None:
    await asyncio.Event().wait()


async def _stand_still(how: str, number: int) -> None:
    match how:
        case "one" if number == 1:
            await _wait_for_ever()
        case "all":
            await asyncio.gather(asyncio.sleep(0.01), _wait_for_ever())
        case "lock":
            await _lock.acquire()
        case "process":
            await in_process(_compute_for_ever, timeout_s=3600.0)
        case "reward":
            await compute_reward(_compute_for_ever)
        case "blocked":
            _compute_for_ever()


async def workflow(query: Query, agents: Any) -> Rewards:
    turn = await agents["solver"].generate(f"{query.text}=")
    if "helper" in agents and query.data["hangs"]:
        await agents["helper"].generate(f"{query.text}=")
    if query.data["hangs"]:
        _begun[query.id] += 1
        await _stand_still(query.data["hang"], _begun[query.id])
    return Rewards(solver=float(len(turn.text) % 2))


def train_query(position: int, seed: int, hang: str, since: int) -> Query:
    if hang == "train_query" and position >= since:
        _compute_for_ever()
    return Query(f"q{position}", str(position), {"hang": hang, "hangs": position >= since})


def eval_queries(seed: int, hang: str, since: int) -> list[Query]:
    if hang == "eval_queries":
        _compute_for_ever()
    return [Query("e0", "0", {"hang": "all", "hangs": True})] if hang == "evaluation" else []


def sft(agent: str, batch: int, size: int, seed: int, hang: str, since: int) -> list[tuple[str, str]]:
    if hang == "sft":
        _compute_for_ever()
    return [("1=", "1")] * size


async def setup(hang: str, since: int) -> None:
    global _hang
    _hang = hang
    if hang == "setup":
        await _wait_for_ever()
    if hang == "setup blocks":
        _compute_for_ever()


async def teardown() -> None:
    if _hang == "teardown":
        await _wait_for_ever()
    if _hang == "teardown blocks":
        _compute_for_ever()
