"""The store actor: acknowledged writes survive, others leave no trace, and writers to a full store wait."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from flexmarl.actors.columns.store_client import ExperienceReader, ExperienceWriter, segment_directories
from flexmarl.actors.errors import StoreError, WriterRetired
from flexmarl.actors.messages import MOST_VERSION_CHANGES, AgentTurns, GroupClosed, Sample, Truncation
from flexmarl.actors.names import AgentName, PolicyName, Step
from flexmarl.actors.run_events import StoreBlocked, StoreUnblocked
from flexmarl.actors.store.segment_arena import ArenaLimits
from flexmarl.actors.store.store import Store
from flexmarl.core.errors import ActorDead
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem

from ...patience import PATIENCE_S
from ..stores import SOLVER, store_setup
from .listener import Listener

AGENTS = ["solver", "judge"]


def sample(number: int, *, agent: str = "solver", version: int = 0, tokens: int = 100) -> Sample:
    turn, trajectory = AGENTS.index(agent), number % 8
    group = f"1:q{number // 8}"
    return Sample(
        f"{group}_{turn}_{trajectory}", agent, 1, version, group, float(number), number / 2,
        (1, 2, 3), tuple(range(tokens)), (-0.5,) * tokens,
    )  # fmt: skip


class House:
    def __init__(self, system: ActorSystem, private: Path, folder: Path) -> None:
        self.system, self.memory, self.folder = system, private, folder
        folder.mkdir(mode=0o700, exist_ok=True)

    async def open(self, **options: Any) -> ActorRef[Store]:
        """In a process of its own, which is not restarted."""
        setup = store_setup(AGENTS, self.folder, **options)
        self.store = await self.system.spawn(Store, "store", setup, process=True)
        places = segment_directories(self.memory, self.folder)
        self.writer = ExperienceWriter(self.store, "writer", places)
        self.reader = ExperienceReader(self.store, places)
        return self.store

    async def rows(self, version: int, count: int, agent: str = "solver") -> list[Sample]:
        return await self.reader.samples(await self.store.api.lease(PolicyName(agent), version, count))

    async def kill(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while "store" not in (statistics := await self.system.process_statistics()):
                await asyncio.sleep(0.01)  # its supervisor does not know yet that it has started
        os.kill(statistics["store"].pid, signal.SIGKILL)
        with pytest.raises(ActorDead):
            await self.store.within(PATIENCE_S).table_statistics()


@pytest.fixture
async def house(system: ActorSystem, private: Path, tmp_path: Path) -> AsyncIterator[House]:
    made = House(system, private, tmp_path / "store")
    yield made
    made.writer.close()


async def test_samples_come_out_as_they_went_in(house: House) -> None:
    await house.open()
    samples = [sample(n, agent=AGENTS[n % 2], tokens=1 + n * 7) for n in range(20)]
    most = (1_000_000, 100_000) * MOST_VERSION_CHANGES
    samples[4:6] = (
        replace(samples[4], version_changes=(3, 1, 20, 5)),
        replace(samples[5], version_changes=most, truncation=Truncation(40, 0.95, 0.1 + 0.2)),
    )
    await house.writer.put(samples)
    solver, judge = await house.rows(0, 10), await house.rows(0, 10, "judge")
    assert solver == samples[::2] and judge == samples[1::2]


async def test_two_agents_on_one_policy_are_leased_together(house: House) -> None:
    await house.open(policies=dict.fromkeys(map(AgentName, AGENTS), PolicyName("shared")))
    samples = [replace(sample(n, agent=AGENTS[n % 2]), temperature=0.5 + n % 2) for n in range(20)]
    for one in samples:
        await house.writer.put([one])
    assert await house.rows(0, 7, "shared") == samples[:7]
    batch = await house.store.api.lease(PolicyName("shared"), 0, 13)
    assert await house.reader.samples(batch) == samples[7:]
    assert await house.store.api.commit(PolicyName("shared"), [batch.fence], 1) == 13
    counts = await house.store.api.table_statistics()
    assert [(counts[agent].leased, counts[agent].consumed) for agent in AGENTS] == [(4, 6), (3, 7)]


async def test_a_row_is_as_stale_as_its_oldest_token(house: House) -> None:
    await house.open(max_staleness=2)
    await house.writer.put([replace(sample(1), version_changes=(1, 3))])
    with pytest.raises(StoreError, match="1 rows .* 0 are ready"):
        await house.rows(3, 1)
    (row,) = await house.rows(2, 1)
    assert row.token_versions == (0,) + (3,) * 99


async def test_what_was_acknowledged_survives_a_kill_and_nothing_is_trained_twice(house: House) -> None:
    """Writers, leases and commits continue while the store is killed again and again."""
    await house.open()
    acknowledged: set[str] = set()
    consumed: list[str] = []
    put = 0
    for incarnation in range(3):
        for _ in range(4):
            batch = [sample(n) for n in range(put, put + 8)]
            put += 8
            await house.writer.put(batch)
            acknowledged |= {row.sample_id for row in batch}
        leased = await house.store.api.lease(SOLVER, 0, 16)
        ids = [row.sample_id for row in await house.reader.samples(leased)]
        await house.store.api.commit(SOLVER, [leased.fence], incarnation + 1)
        consumed += ids
        lost = await house.store.api.lease(SOLVER, 0, 8)  # dies with its store
        await house.kill()
        counts = (await house.store.within(PATIENCE_S).table_statistics())["solver"]
        assert (counts.ready, counts.leased, counts.consumed) == (put - len(consumed), 0, len(consumed))
        with pytest.raises(StoreError, match="no lease with fence"):
            await house.store.api.commit(SOLVER, [lost.fence], incarnation + 2)
    rest = await house.rows(0, put - len(consumed))
    consumed += [row.sample_id for row in rest]
    assert sorted(consumed) == sorted(acknowledged) and len(set(consumed)) == len(consumed)


async def test_a_commit_that_comes_twice_is_one(house: House) -> None:
    await house.open()
    await house.writer.put([sample(n) for n in range(8)])
    leased = await house.store.api.lease(SOLVER, 0, 8)
    assert await house.store.api.commit(SOLVER, [leased.fence], 1) == 8
    assert await house.store.api.commit(SOLVER, [leased.fence], 1) == 8
    assert (await house.store.api.table_statistics())["solver"].consumed == 8
    assert (await house.store.api.store_statistics()).live_bytes == 0


async def test_what_is_refused_changes_nothing(house: House) -> None:
    await house.open()
    await house.writer.put([sample(0)])
    for bad, words in (
        ([sample(1), sample(0)], "sample 1:q0_0_0 was written before and is ready"),
        ([sample(1, agent="judge"), sample(1, version=-1)], "policy_version has values that are not whole"),
    ):
        with pytest.raises(StoreError, match=words):
            await house.writer.put(bad)
    with pytest.raises(StoreError, match="is not a segment that stranger may write to"):
        await ExperienceWriter.put(stranger(house), [sample(2)])
    counts = await house.store.api.table_statistics()
    assert (counts["solver"].ready, counts["judge"].ready) == (1, 0)


def stranger(house: House) -> ExperienceWriter:
    """Writes into the segments of another."""
    house.writer._name = "stranger"
    return house.writer


async def test_a_lease_that_expires_gives_its_rows_back(
    house: House, monkeypatch: pytest.MonkeyPatch, system: ActorSystem
) -> None:
    await house.open(lease_s=0.01)
    await house.writer.put([sample(n) for n in range(8)])
    first = await house.store.api.lease(SOLVER, 0, 8)
    async with asyncio.timeout(PATIENCE_S):
        while (await house.store.api.table_statistics())["solver"].ready < 8:
            await asyncio.sleep(0.1)
    second = await house.store.api.lease(SOLVER, 0, 8)
    with pytest.raises(StoreError, match="no lease with fence .* is active: it expired"):
        await house.store.api.commit(SOLVER, [first.fence], 1)
    assert second.fence > first.fence


async def test_a_full_store_makes_its_writers_wait(house: House) -> None:
    small = ArenaLimits(segment_bytes=2**16, memory_bytes=2**17, disk_bytes=2**17, disk_free_bytes=0)
    await house.open(limits=small)
    puts = [asyncio.ensure_future(house.writer.put([sample(n, tokens=4000)])) for n in range(12)]
    done = 0
    async with asyncio.timeout(PATIENCE_S):
        while done < 12:
            ready = (await house.store.api.table_statistics())["solver"].ready
            if not ready:
                await asyncio.sleep(0.01)
                continue
            statistics = await house.store.api.store_statistics()
            assert statistics.memory_bytes <= 2**17 and statistics.disk_bytes <= 2**17
            leased = await house.store.api.lease(SOLVER, 0, ready)
            await house.reader.samples(leased)
            done += await house.store.api.commit(SOLVER, [leased.fence], done + 1)
    await asyncio.gather(*puts)


async def test_a_store_that_is_too_small_says_so(house: House) -> None:
    """Rows can't be consumed before more come, and there is no room for more."""
    small = ArenaLimits(segment_bytes=2**16, memory_bytes=2**16, disk_bytes=2**16, disk_free_bytes=0)
    await house.open(limits=small, patience_s=0.5)
    puts = [asyncio.ensure_future(house.writer.put([sample(n, tokens=4000)])) for n in range(12)]
    with pytest.raises(StoreError, match=r"steps under way do not fit\. Raise store\.memory_bytes"):
        await asyncio.gather(*puts)
    for put in puts:
        put.cancel()
    await asyncio.gather(*puts, return_exceptions=True)


async def test_on_a_full_disk_puts_and_commits_wait_until_it_is_cleared(
    house: House, system: ActorSystem
) -> None:
    console = Listener()
    await house.open(console=await system.add(console, "console"))
    await house.writer.put([sample(n) for n in range(8)])
    leased = await house.store.api.lease(SOLVER, 0, 8)
    process = psutil.Process((await system.process_statistics())["store"].pid)
    no_limit = process.rlimit(psutil.RLIMIT_FSIZE)
    journal = (house.folder / "samples.journal").stat().st_size
    process.rlimit(psutil.RLIMIT_FSIZE, (journal, no_limit[1]))  # as a full disk: not a byte more fits
    put = asyncio.ensure_future(house.writer.put([sample(n) for n in range(8, 16)]))
    commit = asyncio.ensure_future(house.store.api.commit(SOLVER, [leased.fence], 1))
    async with asyncio.timeout(PATIENCE_S):
        event = await console.events.get()
        assert isinstance(event, StoreBlocked) and "no room for" in event.problem
        assert not put.done() and not commit.done()
        counts = (await house.store.api.table_statistics())["solver"]
        assert (counts.ready, counts.leased, counts.consumed) == (0, 8, 0)
        process.rlimit(psutil.RLIMIT_FSIZE, no_limit)
        assert await commit == 8
        await put
        assert await console.events.get() == StoreUnblocked()
    assert [row.sample_id for row in await house.rows(0, 8)] == [sample(n).sample_id for n in range(8, 16)]


async def test_rows_are_selected_by_an_expression(house: House) -> None:
    await house.open()
    await house.writer.put([sample(n, agent=AGENTS[n % 2]) for n in range(20)])
    found = await house.store.api.select("reward > 10 and agent = 'judge'", 3)
    assert found.total == 5 and [row["reward"] for row in found.rows] == [11.0, 13.0, 15.0]
    with pytest.raises(StoreError, match="there is no column rewrd; there are: agent"):
        await house.store.api.select("rewrd > 1", 10)


def report(query: str, step: int = 1) -> GroupClosed:
    solver = AgentName("solver")
    return GroupClosed(
        Step(step),
        query,
        {solver: 1},
        {solver: AgentTurns({"turns": 1, "tokens": 2})},
        0.5,
        {solver: [1.0]},
        [],
    )


async def test_a_retired_writer_is_refused_and_its_reports_are_returned_also_after_a_kill(
    house: House,
) -> None:
    store = await house.open(limits=ArenaLimits(segment_bytes=2**16))
    other = ExperienceWriter(store, "other", segment_directories(house.memory, house.folder))
    await house.writer.put([sample(0)], report("q0"))
    await house.writer.put([replace(sample(8), sample_id="2:q1_0_0", step=2)], report("q1", step=2))
    await other.put([sample(16)], report("q2"))
    await house.kill()  # and the supervisor of this system restarts it
    await house.writer.put([sample(24)], report("q3"))
    expected = [report("q0"), report("q1", step=2), report("q3")]
    for _ in range(2):
        assert await store.api.retire("writer") == expected
        with pytest.raises(WriterRetired):
            await house.writer.put([sample(32)], report("q4"))
        with pytest.raises(WriterRetired):
            await store.api.grant("writer", 9, 1, [])
        await house.kill()
    await store.api.forget_reports(Step(2))
    assert await store.api.retire("writer") == [report("q0"), report("q3")]
    assert await store.api.retire("other") == [report("q2")]
    assert len(await house.rows(0, 4)) == 4, "what it had put counts"
    other.close()


async def test_the_segments_of_a_retired_writer_are_freed_with_their_last_row(house: House) -> None:
    store = await house.open(limits=ArenaLimits(segment_bytes=2**16))
    await house.writer.put([sample(0)], report("q0"))
    empty = await store.api.grant("writer", 9, 1, [])
    places = segment_directories(house.memory, house.folder)
    assert places.path(empty.segment).exists()
    await store.api.retire("writer")
    assert not places.path(empty.segment).exists(), "no row refers to it"
    assert (await store.api.store_statistics()).memory_bytes == 2**16
    batch = await store.api.lease(SOLVER, 0, 1)
    assert await house.reader.samples(batch) == [sample(0)]
    await store.api.commit(SOLVER, [batch.fence], 1)
    assert (await store.api.store_statistics()).memory_bytes == 0


async def test_a_grant_that_is_asked_for_again_is_the_same_also_after_a_kill(house: House) -> None:
    store = await house.open(limits=ArenaLimits(segment_bytes=2**16))
    first = await store.api.grant("writer", 0, 1, [])
    assert await store.api.grant("writer", 0, 2**16, []) == first
    assert (await store.api.grant("other", 0, 1, [])).segment != first.segment
    await house.kill()
    assert await store.api.grant("writer", 0, 1, []) == first
    assert (await store.api.store_statistics()).memory_bytes == 2 * 2**16
    second = await store.api.grant("writer", 1, 1, [first.segment])
    assert second.segment != first.segment
    await house.kill()
    assert await store.api.grant("writer", 1, 1, [first.segment]) == second
    assert (await store.api.store_statistics()).memory_bytes == 2 * 2**16, "the finished one is gone"


async def test_a_grant_that_is_too_small_for_the_next_request_is_replaced(house: House) -> None:
    store = await house.open(limits=ArenaLimits(segment_bytes=2**16))
    small = await store.api.grant("writer", 0, 1, [])
    large = await store.api.grant("writer", 0, 2**17, [])
    assert large.size_bytes == 2**17 and large.segment != small.segment
    await house.kill()
    assert await store.api.grant("writer", 0, 2**17, []) == large
    assert (await store.api.store_statistics()).memory_bytes == 2**17, "nothing was written to the small one"


async def test_a_put_that_waits_for_room_when_its_writer_is_retired_is_refused(house: House) -> None:
    limits = ArenaLimits(segment_bytes=2**12, memory_bytes=2**12, disk_bytes=0)
    store = await house.open(limits=limits, patience_s=PATIENCE_S)
    await house.writer.put([sample(0)], report("q0"))
    waiting = asyncio.create_task(house.writer.put([sample(n, tokens=200) for n in range(8, 10)]))
    async with asyncio.timeout(PATIENCE_S):
        while not (await store.api.table_statistics())["solver"].ready or waiting.done():
            await asyncio.sleep(0.01)
    assert await store.api.retire("writer") == [report("q0")]
    with pytest.raises(WriterRetired):
        await asyncio.wait_for(waiting, PATIENCE_S)
