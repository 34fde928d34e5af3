"""Writers and readers on other hosts than the store's: bytes stay with their writer, and are lost with it."""

import asyncio
import errno
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from flexmarl.actors.columns import store_client
from flexmarl.actors.columns.store_client import (
    ARRAY_COLUMNS,
    ExperienceReader,
    ExperienceWriter,
    far_reader,
    segment_directories,
    writer_node,
)
from flexmarl.actors.errors import SamplesLost, SamplesUnreachable, StoreFull, TooFewRows
from flexmarl.actors.messages import StoreApi
from flexmarl.actors.segments.far_segments import WriterNode
from flexmarl.actors.segments.segments import SegmentGrant
from flexmarl.actors.store.segment_arena import ArenaLimits
from flexmarl.actors.store.store import Store
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.curve import Keys
from flexmarl.core.wire.zeromq import Tcp
from flexmarl.transport.remote.bulk import secure
from flexmarl.transport.remote.fetch import connect
from flexmarl.transport.remote.frames import NamedRange

from ...patience import PATIENCE_S
from ..stores import SOLVER, store_setup
from .test_store import AGENTS, report, sample

KEYS = Keys.make()
SEGMENT = 2**12
ROOT = Path(__file__).parents[3]


class Hosts:
    """A store on the host ``store``, and systems on others, each with a directory of its own. ``encrypted``: what they
    exchange."""

    def __init__(self, base: Path, stack: AsyncExitStack, encrypted: bool) -> None:
        self._base, self._stack, self._encrypted = base, stack, encrypted
        self._systems: dict[str, ActorSystem] = {}
        self.writers: list[ExperienceWriter] = []

    async def open(self) -> None:
        system = await self.system("store")
        await self._start(system)
        self.address = system.address
        self.store = self.ref(system)

    async def _start(self, system: ActorSystem) -> None:
        limits = ArenaLimits(segment_bytes=SEGMENT, memory_bytes=4 * SEGMENT, disk_bytes=0)
        await system.add(Store(store_setup(AGENTS, self._base / "folder", limits=limits)), "store")

    async def restart(self) -> None:
        """Another store takes the place of this one, with its journal."""
        system = await self.system("store")
        await system.remove("store")
        await self._start(system)

    async def system(self, host: str) -> ActorSystem:
        if host not in self._systems:
            self.directory(host).mkdir(mode=0o700)
            made = ActorSystem(host, self.directory(host), tcp=Tcp(keys=KEYS))
            self._systems[host] = await self._stack.enter_async_context(made)
        return self._systems[host]

    def directory(self, host: str) -> Path:
        return self._base / host

    def ref(self, system: ActorSystem) -> ActorRef[StoreApi]:
        return system.ref("store", self.address, StoreApi)

    async def writer(self, host: str, name: str = "rollout-0-a") -> ExperienceWriter:
        system = await self.system(host)
        node = writer_node(system, name, f"{name[:-1]}", encrypted=self._encrypted)
        places = segment_directories(system.directory, self._base / "folder")
        made = ExperienceWriter(self.ref(system), name, places, node)
        self.writers.append(made)
        return made

    async def reader(self, host: str) -> ExperienceReader:
        system = await self.system(host)
        places = segment_directories(system.directory, self._base / "folder")
        return ExperienceReader(self.ref(system), places, far_reader(system, encrypted=self._encrypted))

    def segments(self, host: str) -> list[Path]:
        folder = "segments" if host == "store" else "samples"
        return [path for path in self.directory(host).glob(f"{folder}/**/*") if path.is_file()]


@pytest.fixture(params=[True, False], ids=["encrypted", "trusted"])
async def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Hosts]:
    (tmp_path / "folder").mkdir(mode=0o700)
    async with AsyncExitStack() as stack:
        made = Hosts(tmp_path, stack, request.param)
        await made.open()
        yield made
        for writer in made.writers:
            writer.close()


@pytest.mark.parametrize("reading", ["store", "near", "far"])
@pytest.mark.parametrize("writing", ["store", "near"])
async def test_samples_come_out_as_they_went_in_on_every_host(
    hosts: Hosts, writing: str, reading: str
) -> None:
    writer, reader = await hosts.writer(writing), await hosts.reader(reading)
    samples = [sample(number, tokens=1 + number * 7) for number in range(12)]
    await writer.put(samples[:4])
    await writer.put(samples[4:])
    assert bool(hosts.segments("store")) == (writing == "store")
    assert bool(hosts.segments(writing))
    leased = await hosts.store.api.lease(SOLVER, 0, 12)
    assert await reader.samples(leased) == samples
    sizes = [
        np.dtype(dtype).itemsize * len(getattr(one, name))
        for one in samples
        for name, dtype in ARRAY_COLUMNS.items()
    ]
    from_hosts = {} if reading == writing else {"store_bytes_from_hosts": sum(sizes)}
    assert reader.statistics() == from_hosts


async def test_a_batch_of_writers_on_several_hosts_is_one_batch(hosts: Hosts) -> None:
    samples = [sample(number) for number in range(3)]
    for number, host in enumerate(("store", "near", "far")):
        writer = await hosts.writer(host, f"rollout-{number}-a")
        await writer.put([samples[number]])
    leased = await hosts.store.api.lease(SOLVER, 0, 3)
    for host in ("store", "near", "far", "fourth"):
        assert await (await hosts.reader(host)).samples(leased) == samples


async def test_memory_is_freed_on_the_host_of_the_writer_when_its_rows_are_consumed(hosts: Hosts) -> None:
    writer = await hosts.writer("near")
    for version in range(6):  # four segments are the host's limit
        await writer.put([sample(8 * version, version=version, tokens=200)])
        leased = await hosts.store.api.lease(SOLVER, version, 1)
        await hosts.store.api.commit(SOLVER, [leased.fence], version + 1)
    assert len(hosts.segments("near")) <= 2
    writer.close()
    assert not hosts.segments("near")


async def test_a_writer_waits_while_the_memory_of_its_host_is_full(hosts: Hosts) -> None:
    writer = await hosts.writer("near")
    for number in range(4):
        await writer.put([sample(8 * number, tokens=200)])
    waiting = asyncio.create_task(writer.put([sample(80, tokens=200)]))
    leased = await hosts.store.api.lease(SOLVER, 0, 4)
    assert not waiting.done()
    await hosts.store.api.commit(SOLVER, [leased.fence], 1)
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert len(hosts.segments("near")) <= 4


async def test_a_writer_whose_host_stays_full_gives_up_with_the_numbers(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(node: WriterNode, grant: SegmentGrant) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WriterNode, "make", full)
    monkeypatch.setattr(store_client, "_NO_ROOM_S", 0.1)
    monkeypatch.setattr(store_client, "_ROOM_S", 0.05)
    writer = await hosts.writer("near")
    with pytest.raises(
        StoreFull, match=r"no room for 4096 bytes in .*near/samples.*: No space left on device, for 0"
    ):
        await asyncio.wait_for(writer.put([sample(0)]), PATIENCE_S)


async def test_a_writer_goes_on_with_its_segment_after_a_restart_of_the_store(hosts: Hosts) -> None:
    writer = await hosts.writer("near")
    await writer.put([sample(0)])
    await hosts.restart()
    await writer.put([sample(1)])
    assert len(hosts.segments("near")) == 1, "there was room behind the first sample"
    batch = await hosts.store.api.lease(SOLVER, 0, 2)
    assert await (await hosts.reader("far")).samples(batch) == [sample(0), sample(1)]


async def test_a_segment_that_is_not_there_any_more_is_refused(hosts: Hosts) -> None:
    writer = await hosts.writer("near")
    await writer.put([sample(0)])
    leased = await hosts.store.api.lease(SOLVER, 0, 1)
    assert writer._node is not None
    shutil.rmtree(writer._node.folder)
    with pytest.raises(SamplesUnreachable, match="it is not there"):
        await (await hosts.reader("far")).samples(leased)


async def test_a_later_life_of_a_writer_removes_what_the_earlier_one_has_left(hosts: Hosts) -> None:
    await (await hosts.writer("near", "rollout-0-a")).put([sample(0)])
    left = hosts.segments("near")
    await (await hosts.writer("near", "rollout-0-b")).put([sample(8)])
    assert len(hosts.segments("near")) == 1 and hosts.segments("near") != left


async def test_a_reader_that_dies_in_a_fetch_disturbs_nobody(hosts: Hosts) -> None:
    await (await hosts.writer("near")).put([sample(0)])
    leased = await hosts.store.api.lease(SOLVER, 0, 1)
    segment = leased.columns["tokens"]["refs"][0][0]
    reader = await hosts.reader("far")
    assert reader._far is not None
    bulk = reader._far._bulk

    def ask_and_leave() -> None:
        connection: socket.socket = secure(connect(segment.split("/")[0]), bulk, server=False)
        connection.sendall(NamedRange(segment, 0, SEGMENT).encode())
        connection.recv(10)
        connection.close()

    for _ in range(3):
        await asyncio.to_thread(ask_and_leave)
    assert await reader.samples(leased) == [sample(0)]


async def test_a_writer_without_a_network_on_another_host_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    system = await hosts.system("near")
    node = writer_node(system, "rollout-0-a", "rollout-0-", encrypted=True)
    node._bulk = None
    places = segment_directories(system.directory, tmp_path / "folder")
    with pytest.raises(Exception, match=r"on another host than the store.*network\.listen"):
        await ExperienceWriter(hosts.ref(system), "rollout-0-a", places, node).put([sample(0)])


# ----------------------------------------------------------------------- lost

Kill = Callable[[], Awaitable[None]]


@pytest.fixture
async def killed(tmp_path: Path) -> AsyncIterator[tuple[Hosts, Kill]]:
    """A group of four samples in memory of a process, and the function that kills it and waits for its end."""
    (tmp_path / "folder").mkdir(mode=0o700)
    KEYS.save(tmp_path / "keys")
    async with AsyncExitStack() as stack:
        made = Hosts(tmp_path, stack, encrypted=True)
        await made.open()
        (tmp_path / "near").mkdir(mode=0o700)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "tests.actors.store.far_writer",
            str(tmp_path / "keys"), made.address, str(tmp_path / "near"),
            stdout=asyncio.subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            assert await process.stdout.readline() == b"put\n"

        async def kill() -> None:
            if process.returncode is None:
                process.kill()
            await process.wait()

        yield made, kill
        await kill()
        for writer in made.writers:
            writer.close()


async def test_a_group_whose_writer_is_killed_between_put_and_read_begins_again(
    killed: tuple[Hosts, Kill],
) -> None:
    hosts, kill = killed
    store, reader = hosts.store.api, await hosts.reader("far")
    await kill()
    leased = await store.lease(SOLVER, 0, 4)
    with pytest.raises(
        SamplesUnreachable, match="values in memory of .*rollout-0-a can't be fetched: .*refused"
    ):
        await reader.samples(leased)
    await store.give_back(SOLVER, leased.fence)
    assert await store.retire("rollout-0-a") == []
    assert await store.lost_groups("rollout-0-a") == [report("q0")]
    with pytest.raises(TooFewRows, match="0 are ready"):
        await store.lease(SOLVER, 0, 1)
    again = [sample(number) for number in range(4)]
    await (await hosts.writer("third", "rollout-1-a")).put(again, report("q0"))
    leased = await store.lease(SOLVER, 0, 4)
    assert await reader.samples(leased) == again
    assert await store.commit(SOLVER, [leased.fence], 1) == 4


async def test_a_group_of_which_samples_are_trained_is_not_trained_half(
    killed: tuple[Hosts, Kill],
) -> None:
    hosts, kill = killed
    store, reader = hosts.store.api, await hosts.reader("far")
    first = await store.lease(SOLVER, 0, 2)
    assert len(await reader.samples(first)) == 2
    await kill()
    assert await store.retire("rollout-0-a") == [report("q0")]
    assert await store.lost_groups("rollout-0-a") == []
    with pytest.raises(SamplesLost, match="rollout-0-a are lost, and others of their groups are trained"):
        await store.lease(SOLVER, 0, 2)
    assert (await store.table_statistics())["solver"].leased == 2, "the trained ones alone"
