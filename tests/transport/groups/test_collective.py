"""Path ``collective``: several receivers, parts, members that do not come, and shards."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import torch

from flexmarl.transport.errors import MemberMissing, NoPath, StateMismatch
from flexmarl.transport.groups.group import GroupAddress
from flexmarl.transport.groups.plan import whole
from flexmarl.transport.handle import TensorSpec
from flexmarl.transport.state import StateTransport

from ...patience import PATIENCE_S

torch.set_num_threads(1)
MEMBERS = ("trainer", "e0", "e1")


@asynccontextmanager
async def group_of(directory: Path) -> AsyncIterator[dict[str, StateTransport]]:
    async with AsyncExitStack() as exits:
        transports = {name: await exits.enter_async_context(StateTransport(directory)) for name in MEMBERS}
        address = GroupAddress("weights", MEMBERS)
        await asyncio.gather(*(transport.join(address, name) for name, transport in transports.items()))
        for transport in transports.values():
            transport._collective._join_s = PATIENCE_S
        yield transports


async def test_all_members_get_what_each_wants_of_one_transfer(tmp_path: Path) -> None:
    async with group_of(tmp_path) as members:
        state = {"w": torch.arange(3000.0).view(1000, 3), "b": torch.ones(3)}
        handle = await members["trainer"].set("key", state, version=1, offer=["collective"])
        state["b"].zero_()  # a copy was taken
        for _ in range(2):
            whole_state, part = await asyncio.gather(
                members["e0"].get(handle), members["e1"].get(handle, names=["w"], rows={"w": (7, 900)})
            )
            assert torch.equal(whole_state["w"], state["w"]) and whole_state["b"].eq(1).all()
            assert part.keys() == {"w"} and torch.equal(part["w"], state["w"][7:900])
    assert list(tmp_path.iterdir()) == []


async def test_a_member_that_does_not_come_is_named_and_the_next_transfer_succeeds(tmp_path: Path) -> None:
    async with group_of(tmp_path) as members:
        members["trainer"]._collective._join_s = 0.2
        handle = await members["trainer"].set(
            "key", {"w": torch.ones(3)}, version=1, offer=["collective", "shm"]
        )
        with pytest.raises(
            MemberMissing, match=r"group weights: e1 missing within .* \(state key\)"
        ) as raised:
            await members["e0"].get(handle, path="collective")
        assert raised.value.missing == ["e1"]
        assert (await members["e0"].get(handle))["w"].eq(1).all(), "by shared memory"
        members["trainer"]._collective._join_s = PATIENCE_S
        got = await asyncio.gather(*(members[name].get(handle, path="collective") for name in ("e0", "e1")))
        assert all(one["w"].eq(1).all() for one in got)


async def test_a_process_outside_of_the_group_is_refused(tmp_path: Path, transport: StateTransport) -> None:
    async with group_of(tmp_path) as members:
        handle = await members["trainer"].set("key", {"w": torch.ones(3)}, version=1, offer=["collective"])
        with pytest.raises(NoPath, match="this process has not joined group weights"):
            await transport.get(handle)
    with pytest.raises(ValueError, match="a state is offered to one group; joined: none"):
        await transport.set("key", {"w": torch.ones(3)}, version=1, offer=["collective"])


async def test_a_group_is_joined_once_and_left_by_name(tmp_path: Path) -> None:
    async with group_of(tmp_path) as members:
        with pytest.raises(ValueError, match="group weights: joined already"):
            await members["e0"].join(GroupAddress("weights", MEMBERS), "e0")
        await members["e0"].leave("weights")
        await members["e0"].leave("weights")
        handle = await members["trainer"].set("key", {"w": torch.ones(3)}, version=1, offer=["collective"])
        with pytest.raises(NoPath):
            await members["e0"].get(handle)


async def test_shards_are_exchanged(tmp_path: Path) -> None:
    specs = [TensorSpec("w", (10, 2), "float32", 0), TensorSpec("b", (4,), "int64", 128)]
    held = {"trainer": {"w": (0, 5), "b": (0, 4)}, "e0": {"w": (5, 10)}}
    wanted = {"e1": whole(specs), "e0": {"w": (4, 6)}}
    state = {"w": torch.arange(20.0).view(10, 2), "b": torch.arange(4)}
    into = {
        "e1": {"w": torch.zeros(10, 2), "b": torch.zeros(4, dtype=torch.int64)},
        "e0": {"w": torch.zeros(2, 2)},
    }
    async with group_of(tmp_path) as members:
        for _ in range(2):
            await asyncio.gather(
                *(
                    transport.exchange(
                        "weights", "key", specs, held=held, wanted=wanted,
                        mine={n: state[n][start:stop] for n, (start, stop) in held.get(name, {}).items()},
                        into=into.get(name, {}),
                    )
                    for name, transport in members.items()
                )
            )  # fmt: skip
            assert torch.equal(into["e1"]["w"], state["w"]) and torch.equal(into["e1"]["b"], state["b"])
            assert torch.equal(into["e0"]["w"], state["w"][4:6])


async def test_members_with_different_plans_do_not_begin(tmp_path: Path) -> None:
    specs = [TensorSpec("w", (10, 2), "float32", 0)]
    held = {"trainer": {"w": (0, 10)}}
    async with group_of(tmp_path) as members:
        results = await asyncio.gather(
            *(
                transport.exchange(
                    "weights", "key", specs, held=held,
                    wanted={"e1": {"w": (0, 3 if name == "e1" else 4)}}, mine={}, into={},
                )
                for name, transport in members.items()
            ),
            return_exceptions=True,
        )  # fmt: skip
    assert all(isinstance(result, StateMismatch) for result in results)
    assert "e1 has computed another plan" in str(results[0])
