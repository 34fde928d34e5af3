"""The store actor with columns that the run declares, readers elsewhere, and what it refuses."""

import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexmarl.actors.columns.declared_columns import Column
from flexmarl.actors.columns.store_client import ExperienceReader, ExperienceWriter, segment_directories
from flexmarl.actors.errors import StoreError
from flexmarl.actors.messages import Sample, StoreApi
from flexmarl.actors.names import AgentName
from flexmarl.actors.run_events import ColumnsAwaited
from flexmarl.actors.segments.segments import ByteRef
from flexmarl.actors.store.segment_arena import ArenaLimits
from flexmarl.actors.store.store import Store
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.curve import Keys
from flexmarl.core.wire.zeromq import Tcp

from ...patience import PATIENCE_S
from ..stores import SOLVER, store_setup
from .listener import Listener

JUDGED = Column(type="float", required=True, written_by="external", timeout_s=30.0)
COLUMNS = {
    "difficulty": Column(type="float"),
    "plan": Column(type="tokens"),
    "embedding": Column(type="tensor", dtype="float32", shape=(2, 2)),
    "note": Column(type="str"),
}


def sample(number: int, version: int = 0, tokens: int = 3, **columns: Any) -> Sample:
    return Sample(
        f"{version + 1}:q_0_{number}", "solver", version + 1, version, f"{version + 1}:q", 1.0, 0.5,
        (1, 2, 3), tuple(range(tokens)), (-0.5,) * tokens, columns=columns,
    )  # fmt: skip


class House:
    """A store in this process, which may be started again with the same folders."""

    def __init__(self, system: ActorSystem, directory: Path) -> None:
        self.system = system
        self.folder = directory / "store"
        self.places = segment_directories(system.directory, self.folder)
        self.folder.mkdir(mode=0o700)
        self.store: ActorRef[StoreApi]
        self.writer: ExperienceWriter | None = None

    async def open(self, columns: dict[str, Column], **options: Any) -> "House":
        store = Store(store_setup(["solver"], self.folder, columns={"solver": columns}, **options))
        self.store = await self.system.add(store, "store")
        if self.writer is None:
            self.writer = ExperienceWriter(self.store, "writer", self.places)
        return self

    async def put(self, *samples: Sample) -> None:
        assert self.writer is not None
        await self.writer.put(samples)

    async def write(self, **columns: list[Any]) -> None:
        await self.store.api.write("judge", {"solver": columns})

    async def rows(self, where: str = "") -> list[dict[str, Any]]:
        return (await self.store.api.select(where, 100)).rows

    async def statuses(self) -> list[str]:
        return [row["status"] for row in await self.rows()]


@pytest.fixture
async def house(system: ActorSystem, tmp_path: Path) -> AsyncIterator[House]:
    made = House(system, tmp_path)
    yield made
    if made.writer is not None:
        made.writer.close()


async def settled() -> None:
    """Lets every task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


# --------------------------------------------------------------------------- columns


async def test_what_a_workflow_wrote_comes_out_by_value_and_by_reference(house: House) -> None:
    await house.open(COLUMNS)
    embedding = np.array([[0.5, 1.0], [2.0, 3.0]], np.float32)
    plan = np.array([7, 8], np.int32)
    long = "é" * 300
    await house.put(
        sample(0, difficulty=0.3, plan=plan, embedding=embedding, note="short"),
        sample(1, difficulty=0.1, embedding=embedding * 2, note=long),
        sample(2, embedding=embedding, note=""),
    )
    assert [row["sample_id"] for row in await house.rows("difficulty > 0.2 and note = 'short'")] == [
        "1:q_0_0"
    ]
    leased = await house.store.api.lease(SOLVER, 0, 3)
    columns = await ExperienceReader(house.store, house.places).columns(leased)
    assert columns.keys() == COLUMNS.keys()
    assert columns["difficulty"] == [0.3, 0.1, None] and columns["note"] == ["short", long, ""]
    assert columns["plan"][0].tolist() == [7, 8] and columns["plan"][1:] == [None, None]
    assert [array.tolist() for array in columns["embedding"]] == [
        embedding.tolist(),
        (embedding * 2).tolist(),
        embedding.tolist(),
    ]
    assert await house.store.api.commit(SOLVER, [leased.fence], 1) == 3
    assert (await house.store.api.store_statistics()).live_bytes == 0, "what they refer to is given back"


async def test_a_column_of_samples_is_read_without_a_lease(house: House) -> None:
    await house.open(COLUMNS | {"judged": JUDGED})
    long, plan = "é" * 300, np.array([7, 8], np.int32)
    await house.put(sample(0, note=long, plan=plan), sample(1, note="short"), sample(2, tokens=4))
    reader, agent = ExperienceReader(house.store, None), AgentName("solver")
    ids = ["1:q_0_2", "1:q_0_0", "1:q_0_1"]
    assert await reader.column(agent, "note", ids) == [None, long, "short"]
    assert [array.tolist() for array in await reader.column(agent, "tokens", ids)] == [
        [0, 1, 2, 3],
        [0, 1, 2],
        [0, 1, 2],
    ]
    assert (await reader.column(agent, "plan", ids[1:2]))[0].tolist() == [7, 8]
    assert await reader.column(agent, "note", []) == []
    assert await house.statuses() == ["writing"] * 3, "nothing was changed"
    for column, names, why in (
        ("nte", ids, "unknown column 'nte'; there are: reward, .*note"),
        ("note", ["1:q_0_7"], "there is no sample '1:q_0_7'"),
    ):
        with pytest.raises(StoreError, match=why):
            await reader.column(agent, column, names)
    with pytest.raises(StoreError, match="there is no table for agent 'checker'"):
        await reader.column(AgentName("checker"), "note", ids)
    await house.write(sample_id=ids, judged=[1.0] * 3)
    leased = await house.store.api.lease(SOLVER, 0, 3)
    await house.store.api.commit(SOLVER, [leased.fence], 1)
    assert await reader.column(agent, "tokens", ids) == [None] * 3, (
        "they are trained, and their bytes given back"
    )


async def test_a_row_waits_for_what_is_written_by_an_external_writer(house: House) -> None:
    await house.open({"judged": JUDGED})
    await house.put(sample(0), sample(1), sample(2))
    assert await house.statuses() == ["writing"] * 3
    leasing = asyncio.create_task(house.store.api.lease(SOLVER, 0, 2))
    await house.write(sample_id=["1:q_0_2"], judged=[0.5])
    await settled()
    assert not leasing.done() and await house.statuses() == ["writing", "writing", "ready"]
    await house.write(sample_id=["1:q_0_0"], judged=[1.0])
    leased = await leasing
    assert leased.columns["sample_id"] == ["1:q_0_0", "1:q_0_2"] and leased.columns["judged"] == [1.0, 0.5]
    with pytest.raises(StoreError, match="2 rows of version 0 were asked for, 0 are ready"):
        await house.store.api.lease(SOLVER, 0, 2)


async def test_a_small_lease_does_not_overtake_a_large_one_that_waits(house: House) -> None:
    """A trainer asks for several at once and adds up their gradients in the order of its requests."""
    await house.open({"judged": JUDGED})
    await house.put(sample(0), sample(1), sample(2))
    await house.write(sample_id=["1:q_0_2"], judged=[0.5])
    large = asyncio.create_task(house.store.api.lease(SOLVER, 0, 2))
    small = asyncio.create_task(house.store.api.lease(SOLVER, 0, 1))
    await settled()
    assert not small.done()
    await house.write(sample_id=["1:q_0_0", "1:q_0_1"], judged=[1.0, 1.0])
    assert (await large).columns["sample_id"] == ["1:q_0_0", "1:q_0_1"]
    assert (await small).columns["sample_id"] == ["1:q_0_2"]


async def test_rows_of_an_older_version_are_not_passed_over_while_they_wait(house: House) -> None:
    """They would be too old for the next optimizer step."""
    await house.open({"judged": JUDGED}, max_staleness=1)
    await house.put(sample(0), sample(1, version=1))
    await house.write(sample_id=["2:q_0_1"], judged=[0.5])
    leasing = asyncio.create_task(house.store.api.lease(SOLVER, 1, 1))
    await settled()
    assert not leasing.done()
    await house.write(sample_id=["1:q_0_0"], judged=[0.5])
    assert (await leasing).columns["sample_id"] == ["1:q_0_0"]


async def test_a_column_that_is_not_written_in_time_is_named(house: House) -> None:
    await house.open({"judged": JUDGED.model_copy(update={"timeout_s": 0.05})})
    await house.put(sample(0), sample(1))
    await house.write(sample_id=["1:q_0_1"], judged=[0.5])
    words = (
        r"2 rows of version 0 were asked for, and 1 were not complete after 0.05 s: sample 1:q_0_0 of solver lacks "
        r"judged, which an external writer .*agents\.solver\.columns\.judged\.timeout_s"
    )
    with pytest.raises(StoreError, match=words):
        await house.store.api.lease(SOLVER, 0, 2)
    assert await house.statuses() == ["writing", "ready"]


async def test_a_long_wait_is_reported_once(
    house: House, system: ActorSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexmarl.actors.store.column_waits._REPORT_AFTER_S", 0.01)
    console = Listener()
    await house.open({"judged": JUDGED}, console=await system.add(console, "console"))
    await house.put(sample(0), sample(1))
    leasing = asyncio.create_task(house.store.api.lease(SOLVER, 0, 2))
    told = await asyncio.wait_for(console.events.get(), PATIENCE_S)
    assert told == ColumnsAwaited(AgentName("solver"), 2, "judged")
    await house.write(sample_id=["1:q_0_0"], judged=[1.0])
    await asyncio.wait([leasing], timeout=0.1)  # ten times the interval of the report
    await house.write(sample_id=["1:q_0_1"], judged=[1.0])
    await leasing
    assert console.events.empty()


# --------------------------------------------------------------------------- refused, and nothing has changed


@pytest.fixture
async def full(house: House) -> House:
    """A row that is consumed, one that is READY and one that waits for ``judged``."""
    await house.open({"difficulty": Column(type="float"), "judged": JUDGED})
    await house.put(sample(0), sample(1), sample(2))
    for number in (0, 1):
        await house.write(sample_id=[f"1:q_0_{number}"], judged=[0.5])
        if not number:
            leased = await house.store.api.lease(SOLVER, 0, 1)
            await house.store.api.commit(SOLVER, [leased.fence], 1)
    assert await house.statuses() == ["consumed", "ready", "writing"]
    return house


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (
            {"sample_id": ["1:q_0_0"], "difficulty": [0.5]},
            "sample 1:q_0_0 is consumed: it takes no more columns",
        ),
        ({"sample_id": ["1:q_0_2"], "judgd": [0.5]}, "unknown column 'judgd'; there are: reward, .*judged"),
        ({"sample_id": ["1:q_0_2"], "judged": ["0.5"]}, "column judged wants a finite float, not '0.5'"),
        (
            {"sample_id": ["1:q_0_2", "1:q_0_1"], "judged": [0.5, 0.5]},
            "1:q_0_1: column judged was written already",
        ),
        ({"sample_id": ["1:q_0_2"], "reward": [0.5]}, "column reward was written already"),
        ({"sample_id": ["1:q_0_7"], "judged": [0.5]}, "there is no sample '1:q_0_7'"),
        (
            {"sample_id": ["1:q_0_2"], "tokens": [["m-" + "0" * 32, 0, 4, "int32", [1]]]},
            "was written already",
        ),
        ({"judged": [0.5]}, "the column sample_id is missing"),
    ],
)
async def test_a_bad_write_is_refused(full: House, columns: dict[str, Any], why: str) -> None:
    before = await full.rows()
    with pytest.raises(StoreError, match=why):
        await full.write(**columns)
    assert await full.rows() == before


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        ([sample(3), sample(1)], "sample 1:q_0_1 was written before and is ready"),
        ([sample(0)], "sample 1:q_0_0 was written before and is consumed"),
        ([sample(3, difficlty=0.5)], "unknown column 'difficlty'; there are: "),
        (
            [sample(3, difficulty="hard")],
            "sample 1:q_0_3: column difficulty wants a finite float, not 'hard'",
        ),
        ([sample(3, difficulty=np.zeros(2))], "column difficulty wants a finite float"),
    ],
)
async def test_a_bad_put_is_refused(full: House, samples: list[Sample], why: str) -> None:
    before, live = await full.rows(), (await full.store.api.store_statistics()).live_bytes
    with pytest.raises(StoreError, match=why):
        await full.put(*samples)
    assert await full.rows() == before and (await full.store.api.store_statistics()).live_bytes == live


async def test_a_reference_that_is_not_the_writers_is_refused(house: House) -> None:
    await house.open({"plan": Column(type="tokens", written_by="external")})
    await house.put(sample(0))
    grant = await house.store.api.grant("judge", 0, 64, [])
    for writer, segment in (("thief", grant.segment), ("judge", "m-" + "0" * 32)):
        parts = {"solver": {"sample_id": ["1:q_0_0"], "plan": [[segment, 0, 8, "int32", [2]]]}}
        with pytest.raises(StoreError, match=f"is not a segment that {writer} may write to"):
            await house.store.api.write(writer, parts)
    await house.write(sample_id=["1:q_0_0"], plan=[[grant.segment, 0, 8, "int32", [2]]])
    columns = await ExperienceReader(house.store, house.places).columns(
        await house.store.api.lease(SOLVER, 0, 1)
    )
    assert columns["plan"][0].tolist() == [0, 0]


async def test_a_fence_of_an_earlier_epoch_is_refused(full: House) -> None:
    leased = await full.store.api.lease(SOLVER, 0, 1)
    await full.system.remove("store")
    await full.open({"difficulty": Column(type="float"), "judged": JUDGED})
    before = await full.rows()
    with pytest.raises(StoreError, match="it is of epoch 1, the store is in epoch 2"):
        await full.store.api.commit(SOLVER, [leased.fence], 2)
    assert await full.rows() == before and await full.statuses() == ["consumed", "ready", "writing"]


# --------------------------------------------------------------------------- readers elsewhere


async def test_a_process_that_sees_no_segment_reads_the_same(tmp_path: Path) -> None:
    keys = Keys.make()
    keys.save(tmp_path / "keys")
    long, embedding = "x" * 400, np.arange(4, dtype=np.float32).reshape(2, 2)
    samples = [
        sample(n, tokens=1 + n * 60_001, embedding=embedding + n, note=long if n else None) for n in range(5)
    ]
    samples[3].columns["plan"] = np.arange(3, dtype=np.int32)
    async with ActorSystem("home", tcp=Tcp(keys=keys)) as system:
        house = await House(system, tmp_path).open(COLUMNS, limits=ArenaLimits(segment_bytes=2**20))
        for one in samples:  # into more than one segment
            await house.put(one)
        (tmp_path / "elsewhere").mkdir()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(Path(__file__).with_name("far_reader.py")),
            str(tmp_path / "keys"), system.address, str(tmp_path / "elsewhere"), "5",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        house.writer.close()  # type: ignore[union-attr]
    assert process.returncode == 0
    told = json.loads(out)
    bare = [dataclasses.replace(one, columns={}) for one in samples]
    assert told["samples"] == json.loads(json.dumps([dataclasses.asdict(one) for one in bare]))
    assert told["embedding"] == [(embedding + n).tolist() for n in range(5)]
    assert told["plan"] == [None, None, None, [0, 1, 2], None] and told["note"] == [None, *[long] * 4]
    assert told["aligned"] and not told["writeable"]


async def test_what_is_sent_comes_in_chunks_of_a_mebibyte(house: House) -> None:
    await house.open({})
    await house.put(sample(0, tokens=600_000))
    leased = await house.store.api.lease(SOLVER, 0, 1)
    ((segment, _, (offset,), _),) = leased.columns["tokens"]["refs"]
    ref = ByteRef(segment, offset, 4 * 600_000)
    chunks = [chunk async for chunk in house.store.api.fetch([ref])]
    assert [len(chunk) for chunk in chunks] == [2**20, 2**20, 4 * 600_000 - 2**21]
    assert np.frombuffer(b"".join(chunks), np.int32).tolist() == [*range(600_000)]
    with pytest.raises(StoreError, match="there are no 4 bytes at 0 of segment"):
        async for _ in house.store.api.fetch([ByteRef("m-" + "0" * 32, 0, 4)]):
            pass


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_reader_needs_no_flag(house: House, tmp_path: Path, elsewhere: bool) -> None:
    await house.open({})
    await house.put(sample(0), sample(1, tokens=0))
    leased = await house.store.api.lease(SOLVER, 0, 2)
    places = segment_directories(tmp_path / "no", tmp_path / "where") if elsewhere else house.places
    reader = ExperienceReader(house.store, places)
    assert await reader.samples(leased) == [sample(0), sample(1, tokens=0)]
    assert await ExperienceReader(house.store, None).samples(leased) == [
        sample(0),
        sample(1, tokens=0),
    ]
    reader.forget_consumed()
    reader.close()


# --------------------------------------------------------------------------- tracing


async def test_a_sample_leads_to_its_trajectory(system: ActorSystem, tmp_path: Path) -> None:
    house = House(system, tmp_path)
    columns = {"judge": {"strict": Column(type="bool")}}
    store = Store(store_setup(["solver", "judge"], house.folder, columns=columns))
    ref = await system.add(store, "store")
    writer = ExperienceWriter(ref, "writer", house.places)
    turns = [
        dataclasses.replace(sample(0), sample_id=f"1:q_{turn}_{trajectory}", agent=agent, columns=written)
        for trajectory in (0, 1)
        for turn, agent, written in ((0, "solver", {}), (1, "judge", {"strict": True}), (2, "solver", {}))
    ]
    await writer.put(turns)
    writer.close()
    found = await ref.api.trajectory("1:q_1_1")
    assert [(row["sample_id"], row["agent"], row["strict"]) for row in found.rows] == [
        ("1:q_0_1", "solver", None),
        ("1:q_1_1", "judge", True),
        ("1:q_2_1", "solver", None),
    ]
    assert found.total == 3 and (await ref.api.trajectory("1:q_1")) == found
    with pytest.raises(StoreError, match="neither a sample nor a trajectory '2:q_1'"):
        await ref.api.trajectory("2:q_1")
