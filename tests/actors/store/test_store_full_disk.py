"""The store actor when its journal can't be written, in this process: callers wait, and nothing is lost."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from flexmarl.actors.columns.declared_columns import Column
from flexmarl.actors.columns.store_client import ExperienceWriter, segment_directories
from flexmarl.actors.errors import StoreError
from flexmarl.actors.messages import Sample
from flexmarl.actors.names import PolicyName
from flexmarl.actors.store import column_waits, store_journal
from flexmarl.actors.store import store as store_module
from flexmarl.actors.store.segment_arena import ArenaLimits
from flexmarl.actors.store.store import Store
from flexmarl.core.durable import record_file
from flexmarl.core.durable.record_file import RecordFile
from flexmarl.core.system import ActorSystem

from ...patience import PATIENCE_S
from ..stores import SOLVER, store_setup

T = TypeVar("T")
AGENTS = ["solver", "judge"]


def samples(first: int, count: int, agent: str = "solver") -> list[Sample]:
    turn = AGENTS.index(agent)
    return [
        Sample(f"1:q{n}_{turn}_0", agent, 1, 0, f"1:q{n}", 1.0, 0.5, (1, 2), (3,) * 100, (-0.5,) * 100)
        for n in range(first, first + count)
    ]


class House:
    """A store whose journal's disk is full while ``full``. Tests call its endpoints without messages."""

    def __init__(self, system: ActorSystem, memory: Path, folder: Path) -> None:
        self.system, self.memory, self.folder = system, memory, folder
        folder.mkdir(mode=0o700)
        self.full = False
        self.refused = asyncio.Event()

    async def open(self, name: str = "store", **options: Any) -> Store:
        self.store = Store(store_setup(AGENTS, self.folder, **options))
        reference = await self.system.add(self.store, name)
        self.writer = ExperienceWriter(reference, "writer", segment_directories(self.memory, self.folder))
        return self.store

    async def while_full(self, asked: Awaitable[T]) -> T:
        """The result of ``asked`` when the disk is cleared after it was found full."""
        self.full = True
        self.refused.clear()
        task = asyncio.ensure_future(asked)
        await self.refused.wait()
        assert not task.done()
        self.full = False
        async with asyncio.timeout(PATIENCE_S):
            return await task


@pytest.fixture
async def house(
    system: ActorSystem, private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[House]:
    made = House(system, private, tmp_path / "store")
    append = RecordFile.append

    def append_if_there_is_room(file: RecordFile, records: bytes) -> None:
        if made.full and file.path.name == "samples.journal":
            made.refused.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        append(file, records)

    monkeypatch.setattr(RecordFile, "append", append_if_there_is_room)
    yield made
    made.writer.close()
    assert not system.failure.done(), system.failure


async def test_the_head_of_a_new_journal_waits_for_room_by_its_name(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all = record_file._write_all

    def write_if_there_is_room(descriptor: int, content: bytes) -> None:
        if house.full:
            os.write(descriptor, content[:5])  # a full disk may take a part
            house.refused.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(descriptor, content)

    monkeypatch.setattr(record_file, "_write_all", write_if_there_is_room)
    house.full = True
    opening = asyncio.ensure_future(house.open())
    await house.refused.wait()
    (wait,) = house.store.waits()
    assert (
        wait.text.startswith("room for samples: no room for 20 bytes in ") and "samples.journal" in wait.text
    )
    assert wait.limit == "store.room_timeout_s=1800 ends it" and not opening.done()
    house.full = False
    async with asyncio.timeout(PATIENCE_S):
        store = await opening
    assert store.waits() == []
    await house.writer.put(samples(0, 8))
    assert (await store.table_statistics())["solver"].ready == 8


async def test_a_grant_waits_too(house: House) -> None:
    store = await house.open()
    await house.while_full(house.writer.put(samples(0, 8)))
    assert (await store.table_statistics())["solver"].ready == 8
    assert len(store._arena.granted()) == 1, "what could not be written down is taken back"


async def test_a_segment_is_sealed_all_the_same(house: House) -> None:
    limits = ArenaLimits(segment_bytes=8192, memory_bytes=2**20, disk_bytes=2**20, disk_free_bytes=0)
    store = await house.open(limits=limits)
    await house.writer.put(samples(0, 6))
    await house.while_full(house.writer.put(samples(6, 6)))
    leased = await store.lease(SOLVER, 0, 12)
    await store.commit(SOLVER, [leased.fence], 1)
    assert store._arena.statistics().segments == len(store._arena.granted()) == 1


async def test_a_lease_is_of_rows_that_are_durable(house: House) -> None:
    """A lease waits for a column from outside, which comes, and can't be written down yet."""
    judged = Column(type="float", required=True, written_by="external")
    store = await house.open(columns={"solver": {"judged": judged}})
    rows = samples(0, 2)
    await house.writer.put(rows)
    leasing = asyncio.ensure_future(store.lease(SOLVER, 0, 2))
    columns = {"sample_id": [row.sample_id for row in rows], "judged": [1.0, 2.0]}
    await house.while_full(store.write("people", {"solver": columns}))
    leased = await leasing
    assert list(leased.columns["judged"]) == [1.0, 2.0]
    assert await store.commit(SOLVER, [leased.fence], 1) == 2


async def test_a_commit_whose_caller_was_cancelled_frees_its_memory_all_the_same(house: House) -> None:
    store = await house.open()
    await house.writer.put(samples(0, 8))
    leased = await store.lease(SOLVER, 0, 8)
    commit = asyncio.ensure_future(store.commit(SOLVER, [leased.fence], 1))
    await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    assert (await store.commit(SOLVER, [leased.fence], 1)) == 8
    assert store._arena.statistics().live_refs == 0


async def test_a_grant_whose_caller_was_cancelled_is_taken_back(house: House) -> None:
    store = await house.open()
    grant = asyncio.ensure_future(store.grant("writer", 0, 0, []))
    await asyncio.sleep(0)
    assert store._arena.statistics().segments == 1
    grant.cancel()
    with pytest.raises(asyncio.CancelledError):
        await grant
    assert store._arena.statistics().segments == 0


async def test_statistics_count_rows_bytes_puts_and_commits(house: House) -> None:
    store = await house.open()
    assert set(store.statistics().values()) == {0, store.statistics()["journal_bytes"]}
    await house.writer.put(samples(0, 8))
    await house.writer.put(samples(0, 4, "judge"))
    leased = await store.lease(SOLVER, 0, 3)
    before = store.statistics()
    assert (before["rows_ready"], before["rows_leased"], before["puts"], before["commits"]) == (9, 3, 2, 0)
    assert 0 < before["live_bytes"] < before["segment_bytes"]
    assert before["journal_bytes"] == (house.folder / "samples.journal").stat().st_size
    await store.commit(SOLVER, [leased.fence], 1)
    after = store.statistics()
    assert (after["rows_ready"], after["rows_leased"], after["puts"], after["commits"]) == (9, 0, 2, 1)
    assert after["live_bytes"] == before["live_bytes"] * 9 // 12


async def test_two_commits_of_one_moment_compact_the_journal_once(house: House) -> None:
    store = await house.open()
    leases = []
    for agent in AGENTS:
        await house.writer.put(samples(0, 8, agent))
        leases.append(await store.lease(PolicyName(agent), 0, 8))
    store._journal._due_bytes = 0
    await asyncio.gather(
        *(
            store.commit(PolicyName(agent), [lease.fence], 1)
            for agent, lease in zip(AGENTS, leases, strict=True)
        )
    )
    await settled(store)
    assert (await store.store_statistics()).compactions == 1


async def settled(store: Store) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not (await store.store_statistics()).compactions:
            await asyncio.sleep(0)


async def test_a_compaction_that_appends_failed_under_is_left_for_later(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_journal, "_CHUNK_BYTES", 512)
    store = await house.open()
    await house.writer.put(samples(0, 128))
    first, second = [await store.lease(SOLVER, 0, 8) for _ in range(2)]
    store._journal._due_bytes = 0
    await store.commit(SOLVER, [first.fence], 1)
    assert await house.while_full(store.commit(SOLVER, [second.fence], 2)) == 8
    assert (await store.store_statistics()).compactions == 0


async def test_rows_whose_memory_is_gone_are_discarded_and_the_store_continues(house: House) -> None:
    """As after a restart of the machine: what was on tmpfs is lost, what was on the disk is not."""
    store = await house.open()
    await house.writer.put(samples(0, 8))
    await store.on_stop()
    house.writer.close()
    for segment in segment_directories(house.memory, house.folder).memory.iterdir():
        segment.unlink()
    again = await house.open("again")
    counts = again._tables.counts()["solver"]
    assert (counts.ready, counts.discarded) == (0, 8)
    await house.writer.put(samples(8, 8))
    assert (await again.table_statistics())["solver"].ready == 8


class Clock:
    """A store's time, that a test sets forward."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = store.system.clock()
        monkeypatch.setattr(type(store.system), "clock", property(lambda _: lambda: self.now_s))


async def refused(house: House) -> None:
    house.refused.clear()
    async with asyncio.timeout(PATIENCE_S):
        await house.refused.wait()


async def test_a_disk_that_stays_full_ends_the_put_after_the_room_timeout(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from the time at which it was full: nothing had moved for long before that."""
    monkeypatch.setattr(store_module, "_ROOM_INTERVAL_S", 0.001)
    store = await house.open(patience_s=60.0)
    clock = Clock(store, monkeypatch)
    await house.writer.put(samples(0, 8))
    assert store.waits() == [] and store.progress() == 1
    clock.now_s += 3600.0
    house.full = True
    put = asyncio.ensure_future(house.writer.put(samples(8, 8)))
    await refused(house)
    await refused(house)
    assert not put.done()
    clock.now_s += 59.0
    await refused(house)
    await refused(house)
    (wait,) = store.waits()
    assert wait.text.startswith("room for samples: ") and wait.seconds == 59.0 and not wait.actor
    assert wait.limit == "store.room_timeout_s=60 ends it"
    assert not put.done() and store.progress() == 1
    clock.now_s += 2.0
    with pytest.raises(StoreError, match=r"for 61 s no sample .* \(store.room_timeout_s=60\): free the disk"):
        async with asyncio.timeout(PATIENCE_S):
            await put
    house.full = False
    await house.writer.put(samples(16, 8))
    assert store.waits() == [] and store.progress() == 2


async def test_a_lease_that_waits_for_a_column_from_outside_is_named_since_its_beginning(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it looks again at intervals."""
    monkeypatch.setattr(column_waits, "_REPORT_AFTER_S", 0.001)
    grade = Column(type="float", required=True, written_by="external", timeout_s=500.0)
    store = await house.open(columns={"solver": {"grade": grade}})
    rows = samples(0, 2)
    await house.writer.put(rows)
    leasing = asyncio.ensure_future(store.lease(SOLVER, 0, 2))
    async with asyncio.timeout(PATIENCE_S):
        while not (waits := store.waits()) or waits[0].seconds < 0.02:
            await asyncio.sleep(0.001)
    (wait,) = waits
    assert wait.text == "grade of samples of solver, from a program outside the run"
    assert wait.limit == "agents.solver.columns.grade.timeout_s=500 ends it"
    columns = {"sample_id": [row.sample_id for row in rows], "grade": [1.0, 2.0]}
    before = store.progress()
    await store.write("people", {"solver": columns})
    await leasing
    assert store.waits() == [] and store.progress() == before + 1


async def test_a_write_that_is_refused_is_no_progress(house: House) -> None:
    store = await house.open()
    with pytest.raises(StoreError):
        await store.write("people", {"solver": {"sample_id": ["1:q9_0_0"], "grade": [1.0]}})
    assert store.progress() == 0
