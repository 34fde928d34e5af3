"""Set and Get beyond the contract of the paths: other processes, cancellation, clean-up."""

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from flexmarl.core.errors import UnsafeDirectory
from flexmarl.transport import StateHandle
from flexmarl.transport.errors import (
    NoPath,
    StaleHandle,
    TransferTimeout,
    TransportClosed,
)
from flexmarl.transport.handle import ShmSource
from flexmarl.transport.host_memory.block import Block
from flexmarl.transport.payload import Copying, Part
from flexmarl.transport.state import StateTransport

from ..patience import PATIENCE_S

torch.set_num_threads(1)

PEER = Path(__file__).with_name("peer.py")
HANDLES = TypeAdapter(StateHandle)
LARGE = 16 << 20  # elements of 4 bytes: many parts, between which a copy may be interrupted


def files(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def source_of(handle: StateHandle) -> ShmSource:
    source = handle.source("shm")
    assert isinstance(source, ShmSource)
    return source


def block_of(handle: StateHandle) -> str:
    """The name of the file with the state."""
    return source_of(handle).block


@asynccontextmanager
async def peer(directory: Path, versions: int, elements: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PEER), str(directory), str(versions), str(elements),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def next_handle(process: asyncio.subprocess.Process) -> StateHandle | None:
    assert process.stdout is not None
    line = await process.stdout.readline()
    return HANDLES.validate_json(line) if line else None


# ----------------------------------------------------------------------- two processes


async def test_a_busy_writer_in_another_process_never_tears_a_read(
    tmp_path: Path, reader: StateTransport
) -> None:
    newest: list[StateHandle] = []
    first = asyncio.Event()

    async def follow() -> None:
        while (handle := await next_handle(process)) is not None:
            newest[:] = [handle]
            first.set()

    into = {name: torch.empty(1 << 17) for name in "abcd"}
    whole: set[int] = set()
    stale = reads = 0
    async with peer(tmp_path, 10**6, 4 << 17) as process, asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow())
        await first.wait()
        while reads < 250 or len(whole) < 2 or not stale:
            (handle,) = newest
            reads += 1
            try:
                await reader.get(handle, into=into)
            except StaleHandle as error:
                stale += 1
                assert error.newest is not None and error.newest > error.version == handle.version
            else:
                whole.add(handle.version)
                for tensor in into.values():
                    assert tensor.min() == tensor.max() == handle.version
        following.cancel()


async def test_a_killed_owner_leaves_files_only_in_the_directory(
    tmp_path: Path, reader: StateTransport
) -> None:
    async with peer(tmp_path, 2, 400) as process:
        await next_handle(process)
        handle = await next_handle(process)
        assert handle is not None
        process.send_signal(signal.SIGKILL)
        assert await process.wait() == -signal.SIGKILL
        assert block_of(handle) in files(tmp_path) and len(files(tmp_path)) == 2
        got = await reader.get(handle)  # what it had published is still whole
        assert all(tensor.eq(1).all() for tensor in got.values())
    # Others use /dev/shm at the same time: what is new there must not be this owner's.
    assert not [name for name in files(Path("/dev/shm")) if source_of(handle).process in name]


async def test_an_owner_that_leaves_takes_its_files_along(tmp_path: Path, reader: StateTransport) -> None:
    async with peer(tmp_path, 1, 400) as process:
        handle = await next_handle(process)
        assert handle is not None
        await process.communicate(b"")
        assert process.returncode == 0
    assert files(tmp_path) == []
    with pytest.raises(StaleHandle, match="its owner has left") as raised:
        await reader.get(handle)
    assert raised.value.newest is None


# ----------------------------------------------------------------------- other places


async def test_handles_of_other_hosts(transport: StateTransport, reader: StateTransport) -> None:
    handle = await transport.set("key", {"w": torch.ones(3)}, version=1)
    with pytest.raises(NoPath, match="elsewhere"):
        await reader.get(replace(handle, sources=(replace(source_of(handle), node="elsewhere"),)))


async def test_a_state_is_a_copy(transport: StateTransport) -> None:
    state = {"w": torch.zeros(3)}
    handle = await transport.set("key", state, version=0)
    state["w"] += 1
    assert (await transport.get(handle))["w"].tolist() == [0, 0, 0]


# ----------------------------------------------------------------------- interrupted


class Gate:
    """Holds copies before their first parts: a busy machine may finish one before a test looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun, self._opened = threading.Event(), threading.Event()
        self._opened.set()
        begin = Copying.begin

        def held(copying: Copying, part: Part) -> Callable[[], None]:
            self._begun.set()
            assert self._opened.wait(PATIENCE_S)
            return begin(copying, part)

        monkeypatch.setattr(Copying, "begin", held)

    def shut(self) -> None:
        """Further parts wait."""
        self._begun.clear()
        self._opened.clear()

    def open(self) -> None:
        """The copies continue."""
        self._opened.set()

    async def begun(self) -> None:
        """Returns when a part waits."""
        assert await asyncio.to_thread(self._begun.wait, PATIENCE_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def being_written(directory: Path) -> bool:
    """True while a block in ``directory`` is being written."""
    return any(Block.open(directory, name).generation % 2 for name in files(directory))


async def test_a_cancelled_set_publishes_nothing_and_harms_nothing(
    tmp_path: Path, transport: StateTransport, reader: StateTransport, gate: Gate
) -> None:
    state = {"w": torch.zeros(LARGE)}
    first = await transport.set("key", state, version=1)
    state["w"].fill_(2)
    gate.shut()
    setting = asyncio.create_task(transport.set("key", state, version=2))
    await gate.begun()
    assert being_written(tmp_path)
    setting.cancel()
    setting.cancel()
    await asyncio.sleep(0)  # it takes note
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await setting
    assert transport.statistics().running == 0
    (other,) = set(files(tmp_path)) - {block_of(first)}
    assert Block.open(tmp_path, other).generation == 1  # given up, hence unreadable
    into = {"w": torch.ones(LARGE)}
    assert not (await reader.get(first, into=into))["w"].any()
    third = await transport.set("key", state, version=3)
    assert block_of(third) == other
    assert (await reader.get(third, into=into))["w"].eq(2).all()
    await reader.get(first, into=into)
    assert transport.statistics().by_path["shm"].sets == 2


async def test_a_set_that_outgrows_its_block_and_is_cancelled_leaves_two_files_later(
    tmp_path: Path, transport: StateTransport, reader: StateTransport, gate: Gate
) -> None:
    small = await transport.set("key", {"w": torch.ones(4)}, version=1)
    gate.shut()
    setting = asyncio.create_task(transport.set("key", {"w": torch.zeros(LARGE)}, version=2))
    await gate.begun()
    assert len(files(tmp_path)) == 2
    setting.cancel()
    await asyncio.sleep(0)  # it takes note
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await setting
    assert (await reader.get(small))["w"].tolist() == [1, 1, 1, 1]
    handle = await transport.set("key", {"w": torch.ones(LARGE)}, version=3)
    assert sorted(files(tmp_path)) == sorted([block_of(small), block_of(handle)])
    size_bytes = sum((tmp_path / name).stat().st_size for name in files(tmp_path))
    assert transport.statistics().arena_bytes == size_bytes
    assert (await reader.get(small))["w"].tolist() == [1, 1, 1, 1]


async def test_deadlines_end_transfers(transport: StateTransport, reader: StateTransport) -> None:
    state = {"w": torch.ones(LARGE)}
    handle = await transport.set("key", state, version=1)
    with pytest.raises(TransferTimeout, match=f"set of state key, version 2: {4 * LARGE} bytes by path shm"):
        await transport.set("key", state, version=2, timeout_s=1e-4)
    with pytest.raises(TransferTimeout, match="get of state key, version 1"):
        await reader.get(handle, into=state, timeout_s=1e-4)
    assert transport.statistics().running == reader.statistics().running == 0
    assert (await reader.get(handle))["w"].eq(1).all()


async def test_concurrent_sets_of_one_key_take_turns(
    transport: StateTransport, reader: StateTransport
) -> None:
    states = [{"w": torch.full((1 << 20,), float(version))} for version in range(6)]
    handles = await asyncio.gather(
        *(transport.set("key", state, version=version) for version, state in enumerate(states))
    )
    sources = [handle.source("shm") for handle in handles]
    written = sorted((s.block, s.generation) for s in sources if isinstance(s, ShmSource))
    blocks = sorted({block for block, _ in written})
    assert written == [(block, generation) for block in blocks for generation in (2, 4, 6)]
    assert len(blocks) == 2
    for version in (4, 5):
        assert (await reader.get(handles[version]))["w"].eq(version).all()


async def test_closing_ends_transfers_under_way(tmp_path: Path, gate: Gate) -> None:
    transport = StateTransport(tmp_path)
    gate.shut()
    async with transport:
        setting = asyncio.create_task(transport.set("key", {"w": torch.zeros(LARGE)}, version=0))
        waiting = asyncio.create_task(transport.set("key", {"w": torch.zeros(LARGE)}, version=1))
        await gate.begun()
        assert being_written(tmp_path)
        asyncio.get_running_loop().call_soon(gate.open)  # when the transport waits for the copy
    for task in (setting, waiting):
        with pytest.raises(TransportClosed):
            await task
    assert files(tmp_path) == []


# ----------------------------------------------------------------------- opening and counting


async def test_an_open_directory_is_refused() -> None:
    with pytest.raises(UnsafeDirectory, match="/dev/shm"):
        async with StateTransport(Path("/dev/shm")):
            pass


async def test_statistics_count(transport: StateTransport) -> None:
    handle = await transport.set("key", {"w": torch.ones(10)}, version=0)
    await transport.get(handle)
    counts = transport.statistics()
    assert list(counts.by_path) == ["shm"]
    shm = counts.by_path["shm"]
    assert (shm.sets, shm.gets, shm.set_bytes, shm.get_bytes) == (1, 1, 40, 40)
    assert shm.set_s > 0 and shm.get_s > 0
    assert (counts.running, counts.arena_bytes) == (0, 3 * 4096)
    await transport.set("key", {"w": torch.ones(5)}, version=1)
    assert (shm.sets, transport.statistics().by_path["shm"].set_bytes) == (1, 60), "a snapshot"
    numbers = transport.statistics().numbers()
    assert all(type(value) in (int, float) for value in numbers.values())
    assert numbers["transport_arena_bytes"] == 2 * 3 * 4096
    assert (numbers["transport_shm_get_bytes"], numbers["transport_shm_sets"]) == (40, 2)


async def test_statistics_leave_out_transfers_that_failed(transport: StateTransport) -> None:
    with pytest.raises(TransferTimeout):
        await transport.set("key", {"w": torch.ones(LARGE)}, version=0, timeout_s=1e-4)
    assert transport.statistics().by_path == {}
