"""Lenders of memory for training states, with the same promises: the trainer's own, and an actor on another host."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexmarl.actors.messages import LenderApi, StateLender
from flexmarl.actors.trainer.pool.lender import LENDER, HostLender, Lending
from flexmarl.core.errors import RemoteError
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.curve import Keys
from flexmarl.core.wire.memory import MemoryNetwork
from flexmarl.core.wire.zeromq import Tcp
from flexmarl.transport.errors import ArenaSpace
from flexmarl.transport.handle import StateHandle
from flexmarl.transport.host_memory import block
from flexmarl.transport.remote.bulk import Bulk
from flexmarl.transport.state import StateTransport

from ....patience import PATIENCE_S

MIB = 1 << 20
STATE: dict[str, np.ndarray[Any, Any]] = {"a": np.arange(300_000, dtype=np.float32), "b": np.ones(3)}


@dataclass
class Host:
    """A host's directory, its lender, and a slot worker's transport there; ``other``: one on another host."""

    directory: Path
    lender: StateLender
    slot: StateTransport
    other: StateTransport

    async def read(self, handle: StateHandle, by: StateTransport) -> bool:
        """True if ``by`` reads the state bit for bit."""
        into = {name: np.zeros_like(array) for name, array in STATE.items()}
        await by.get(handle, into=into)
        return all(np.array_equal(into[name], STATE[name]) for name in STATE)


@pytest.fixture(params=["own", "far"])
async def host(request: pytest.FixtureRequest, private: Path) -> AsyncIterator[Host]:
    here, there = private / "here", private / "there"
    for folder in (here, there):
        folder.mkdir(mode=0o700)
    network, tcp = MemoryNetwork(), Tcp(keys=Keys.make())
    async with AsyncExitStack() as stack:
        system = await stack.enter_async_context(
            ActorSystem("node", here, wire=network.wire("node"), tcp=tcp)
        )
        bulk = Bulk.of(system, encrypted=True)
        if request.param == "own":
            lender: StateLender = Lending(await stack.enter_async_context(StateTransport(here, bulk=bulk)))
        else:
            trainer = await stack.enter_async_context(
                ActorSystem("trainer", there, wire=network.wire("trainer"), tcp=tcp)
            )
            await system.add(HostLender("here", here), LENDER)
            ref = trainer.ref(LENDER, system.address, LenderApi)
            lives = await stack.enter_async_context(aclosing(ref.within(PATIENCE_S).enlist(True)))
            assert (await anext(lives)).host == "here"
            lender = ref.within(PATIENCE_S)
        slot = await stack.enter_async_context(StateTransport(here, bulk=bulk))
        other = await stack.enter_async_context(StateTransport(there, bulk=bulk))
        yield Host(here, lender, slot, other)


async def test_a_state_in_lent_memory_outlives_its_writer_and_is_read_on_both_hosts(host: Host) -> None:
    await host.lender.ping()
    lent = await host.lender.lend("solver", 2 * MIB)
    handle = await host.slot.set("solver", STATE, version=1, lent=lent)
    assert handle.lies_in(lent)
    await host.slot.close()
    async with StateTransport(host.directory) as later:
        assert await host.read(handle, later)
    assert await host.read(handle, host.other)


async def test_a_state_of_another_host_is_taken_into_lent_memory(host: Host) -> None:
    lent = await host.lender.lend("solver", 2 * MIB)
    handle = await host.other.set("solver", STATE, version=1)
    taken = await host.lender.take(handle, lent)
    assert taken.lies_in(lent) and taken.digest == handle.digest
    await host.other.drop("solver")
    assert await host.read(taken, host.slot)


async def test_a_state_of_this_host_is_taken_into_lent_memory(host: Host) -> None:
    first, second = [await host.lender.lend("solver", 2 * MIB) for _ in range(2)]
    handle = await host.slot.set("solver", STATE, version=1, lent=first)
    taken = await host.lender.take(handle, second)
    await host.lender.take_back([first])
    assert taken.lies_in(second)
    assert await host.read(taken, host.slot) and await host.read(taken, host.other)


async def test_memory_that_is_read_in_place_is_used(host: Host) -> None:
    lent = await host.lender.lend("solver", 2 * MIB)
    handle = await host.slot.set("solver", STATE, version=1, lent=lent)
    assert not await host.lender.is_used(lent)
    async with host.slot.mapped(handle) as tensors:
        assert await host.lender.is_used(lent)
        del tensors
    assert not await host.lender.is_used(lent)


async def test_a_state_comes_back_from_the_disk(host: Host, tmp_path: Path) -> None:
    lent, file = await host.lender.lend("solver", 2 * MIB), tmp_path / "suspended" / "solver.state"
    handle = await host.slot.set("solver", STATE, version=1, lent=lent)
    await host.lender.store_away(lent, str(file))
    assert file.is_file() and not list(host.directory.glob(lent.block))
    back = await host.lender.bring_back(lent, str(file))
    assert not file.exists()
    assert await host.read(handle.moved(lent, back), host.slot)


async def test_a_disk_without_room_leaves_the_state_in_memory(host: Host) -> None:
    lent = await host.lender.lend("solver", 2 * MIB)
    handle = await host.slot.set("solver", STATE, version=1, lent=lent)
    with pytest.raises(
        (OSError, RemoteError), match=r"No space left|ENOSPC|Not a directory|not permitted|denied|File exists"
    ):
        await host.lender.store_away(lent, "/proc/version/solver.state")
    assert await host.read(handle, host.slot)


async def test_memory_that_does_not_fit_is_refused_by_its_numbers(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "free_bytes", lambda _: MIB)
    with pytest.raises(ArenaSpace, match="state solver: an arena of") as refused:
        await host.lender.lend("solver", 2 * MIB)
    assert refused.value.free_bytes == MIB


async def test_a_lender_frees_its_memory_when_the_trainer_leaves_or_its_process_ends(private: Path) -> None:
    network = MemoryNetwork()
    async with (
        ActorSystem("node", private, wire=network.wire("node")) as node,
        ActorSystem("trainer", private, wire=network.wire("trainer")) as trainer,
    ):
        await node.add(HostLender("here", private), LENDER)
        ref = trainer.ref(LENDER, node.address, LenderApi)
        for _ in range(2):
            async with aclosing(ref.within(PATIENCE_S).enlist(True)) as lives:
                await anext(lives)
                lent = await ref.within(PATIENCE_S).lend("solver", MIB)
                assert (private / lent.block).exists()
            async with asyncio.timeout(PATIENCE_S):
                while (private / lent.block).exists():
                    await asyncio.sleep(0.01)
        lives = ref.within(PATIENCE_S).enlist(True)
        await anext(lives)
        lent = await ref.within(PATIENCE_S).lend("solver", MIB)
    assert not (private / lent.block).exists()
