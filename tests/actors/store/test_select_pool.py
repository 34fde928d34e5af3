"""Expressions of clients beside the store's work: their number and their time are bounded, and puts continue."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.columns.store_client import ExperienceWriter, segment_directories
from flexmarl.actors.errors import SelectTimeout, StoreError, TooManySelects
from flexmarl.actors.messages import Sample
from flexmarl.actors.store.select_pool import SelectLimits, SelectPool
from flexmarl.actors.store.store import Store
from flexmarl.core.base.threads import in_thread
from flexmarl.core.system import ActorSystem

from ...patience import PATIENCE_S
from ..stores import store_setup

COLUMNS = {"sample_id": "str", "reward": "float"}
ENDLESS = "(select count(*) from samples a, samples b, samples c, samples d, samples e, samples f) < 0"


def rows() -> Iterator[tuple[Any, ...]]:
    return ((f"0:q_0_{n}", float(n)) for n in range(300))


async def until_running(pool: SelectPool, running: int, waiting: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (pool.running, pool.waiting) != (running, waiting):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("at_once", [1, 2])
async def test_so_many_at_once_and_the_others_wait_in_order(at_once: int) -> None:
    pool = SelectPool(SelectLimits(at_once=at_once, timeout_s=0.05), in_thread)
    begun: list[int] = []
    most = 0

    async def ask(number: int) -> None:
        def noted() -> Iterator[tuple[Any, ...]]:
            nonlocal most
            begun.append(number)
            most = max(most, pool.running)
            return rows()

        with pytest.raises(SelectTimeout):
            await pool.select(COLUMNS, noted, ENDLESS, 10)

    await asyncio.gather(*map(ask, range(12)))
    assert begun == list(range(12))
    assert most == at_once
    assert pool.running == pool.waiting == 0


async def test_too_many_are_refused_with_their_numbers() -> None:
    pool = SelectPool(SelectLimits(at_once=1, waiting=3, timeout_s=600.0), in_thread)
    asked = [asyncio.create_task(pool.select(COLUMNS, rows, ENDLESS, 10)) for _ in range(4)]
    await until_running(pool, 1, 3)
    with pytest.raises(
        TooManySelects, match=r"evaluates 1 expressions and 3 wait for that, .* try again later"
    ):
        await pool.select(COLUMNS, rows, "reward > 1", 10)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    found = await pool.select(COLUMNS, rows, "reward > 297", 1)  # the thread of the cancelled call is free
    assert (found.rows, found.total) == ([{"sample_id": "0:q_0_298", "reward": 298.0}], 2)


async def test_the_time_limit_is_named_with_the_remedy() -> None:
    pool = SelectPool(SelectLimits(timeout_s=0.05), in_thread)
    with pytest.raises(
        SelectTimeout, match=r"longer than 0.05 s, the most that the store spends on one: narrow it"
    ) as raised:
        await pool.select(COLUMNS, rows, ENDLESS, 10)
    assert (raised.value.where, raised.value.timeout_s) == (ENDLESS, 0.05)


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("'{a}' like '%{a}b'", "pattern too complex"),
        ("instr({doubled}, {doubled} || 'b') > 0", "too big"),
    ],
)
async def test_no_single_step_of_an_expression_is_long(where: str, problem: str) -> None:
    """SQLite can be interrupted between its steps only: such a comparison took up to a minute."""
    doubled = "sample_id"
    for _ in range(7):
        doubled = f"({doubled} || {doubled})"
    pool = SelectPool(SelectLimits(), in_thread)
    with pytest.raises(StoreError, match=problem):
        long = [("x" * 1000, 1.0)]
        await pool.select(COLUMNS, lambda: iter(long), where.format(a="a" * 1000, doubled=doubled), 10)


async def test_other_tasks_run_while_the_rows_are_read() -> None:
    pool = SelectPool(SelectLimits(), in_thread)
    read = ticks = 0

    def counted() -> Iterator[tuple[Any, ...]]:
        nonlocal read
        for n in range(3200):
            read += 1
            yield (f"0:q_0_{n}", 0.0)

    task = asyncio.create_task(pool.select(COLUMNS, counted, "reward > 0", 10))
    while read < 3200:
        before = read
        await asyncio.sleep(0)
        assert read - before <= 64
        ticks += 1
    assert ticks >= 50
    assert (await task).total == 0


def sample(number: int) -> Sample:
    group = f"0:q{number // 8}"
    return Sample(f"{group}_0_{number % 8}", "solver", 0, 0, group, 1.0, 0.5, (1, 2), (3, 4), (-0.5, -0.5))


async def test_puts_are_answered_while_twelve_expensive_expressions_are_there(
    system: ActorSystem, private: Path, tmp_path: Path
) -> None:
    setup = store_setup(["solver"], tmp_path, selects=SelectLimits(1, 11, timeout_s=60.0))
    store = await system.spawn(Store, "store", setup, process=True)
    writer = ExperienceWriter(store, "writer", segment_directories(private, tmp_path))
    await writer.put([sample(n) for n in range(256)])
    asked = [asyncio.create_task(store.within(600).select(ENDLESS, 10)) for _ in range(12)]
    with pytest.raises(TooManySelects, match="11 wait"):
        async with asyncio.timeout(PATIENCE_S):
            while True:  # as soon as the twelve have arrived, one more is refused
                more = asyncio.create_task(store.within(600).select("reward > 1", 1))
                done, _ = await asyncio.wait([more], timeout=0.05)
                more.cancel()
                if done:
                    await more
    for n in range(256, 512, 8):
        await writer.put([sample(number) for number in range(n, n + 8)])
    assert not any(task.done() for task in asked)
    assert (await store.api.table_statistics())["solver"].ready == 512
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert (await store.within(PATIENCE_S).select("reward = 1", 1)).total == 512
    writer.close()
