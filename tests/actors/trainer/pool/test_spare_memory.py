"""Memory that no state lies in: taken again by a state of about its size, and freed if others need the room."""

from pathlib import Path

import numpy as np
import pytest

from flexmarl.actors.messages import SavedRest, SavedWeights, StateBytes
from flexmarl.actors.names import PolicyName
from flexmarl.actors.trainer.pool.host_memory import HostMemory
from flexmarl.actors.trainer.pool.lender import Lending
from flexmarl.actors.trainer.pool.rank_memory import RankMemory
from flexmarl.actors.trainer.pool.spare_memory import SpareMemory
from flexmarl.actors.trainer.pool.state_hosts import StateHosts
from flexmarl.core.system import ActorSystem
from flexmarl.transport.errors import ArenaSpace
from flexmarl.transport.host_memory import block
from flexmarl.transport.state import StateTransport

MIB = 1 << 20
SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")


def lent_bytes(transport: StateTransport) -> int:
    return transport.statistics().arena_bytes // MIB * MIB


async def test_a_state_takes_a_piece_of_about_its_size_again(private: Path) -> None:
    async with StateTransport(private) as transport:
        spare = SpareMemory(Lending(transport))
        spare.most_bytes = 100 * MIB
        large, small = await spare.take("solver", 16 * MIB), await spare.take("judge", 4 * MIB)
        for piece in (large, small):
            spare.give_back(piece)
        assert spare.size_bytes == 20 * MIB == lent_bytes(transport)
        assert await spare.take("judge", 15 * MIB) == large
        assert await spare.take("judge", 4 * MIB) == small
        assert spare.size_bytes == 0
        other = await spare.take("judge", 4 * MIB)
        assert other != small and lent_bytes(transport) == 24 * MIB


async def test_a_piece_of_the_side_is_taken_first_and_one_of_another_before_a_new_one(private: Path) -> None:
    async with StateTransport(private) as transport:
        spare = SpareMemory(Lending(transport))
        spare.most_bytes = 100 * MIB
        far, near = await spare.take("solver", 4 * MIB, 0), await spare.take("solver", 4 * MIB, 1)
        assert (far.side, near.side) == (0, 1)
        for piece in (far, near):
            spare.give_back(piece)
        assert [await spare.take("judge", 4 * MIB, 1) for _ in range(2)] == [near, far]
        assert lent_bytes(transport) == 8 * MIB


async def test_more_than_is_kept_is_freed_the_oldest_first(private: Path) -> None:
    async with StateTransport(private) as transport:
        spare = SpareMemory(Lending(transport))
        spare.most_bytes = 12 * MIB
        pieces = [await spare.take("solver", 6 * MIB) for _ in range(3)]
        for piece in pieces:
            spare.give_back(piece)
        await spare.free_excess()
        assert spare.size_bytes == 12 * MIB == lent_bytes(transport)
        assert {(await spare.take("solver", 6 * MIB)).block for _ in range(2)} == {
            piece.block for piece in pieces[1:]
        }


async def test_no_more_is_kept_than_there_is_room_for_beside_suspended_states(
    private: Path, system: ActorSystem
) -> None:
    async with StateTransport(private) as transport:
        hosts = StateHosts(transport, system, lambda work, name: work.close(), encrypted=True)
        memory = HostMemory(hosts, [SOLVER, JUDGE], 10 * MIB, private / "suspended")
        size = StateBytes(MIB, rest=6 * MIB, step=MIB, base=6 * MIB, on_slot=7 * MIB, rows={}, live={})
        for policy in (SOLVER, JUDGE):
            await memory.was_built(policy, [size])
        solver, judge = memory[SOLVER][0], memory[JUDGE][0]

        async def save(rank: RankMemory, version: int) -> None:
            for setting in ("weights", "rest"):
                lent = await (rank.for_weights() if setting == "weights" else rank.for_rest(hosts.head))
                handle = await transport.set(f"x/{setting}", {"x": np.zeros(8)}, version=version, lent=lent)
                if setting == "weights":
                    rank.weights_were_set(SavedWeights(handle, ()))
                else:
                    rank.rest_was_set(SavedRest(handle, {}))
                    await memory.free_excess()

        for version in (1, 2):
            await save(judge, version)
        await save(solver, 1)
        before = lent_bytes(transport)
        await save(judge, 3)
        await save(judge, 4)
        spare = lent_bytes(transport) - before
        assert spare == 6 * MIB, "the limit leaves room for one piece"
        await memory.is_out(SOLVER)
        assert lent_bytes(transport) == before, "a spare piece is freed before a state is stored away"
        assert solver.host_bytes() == 6 * MIB
        await save(judge, 5)
        assert lent_bytes(transport) == before, "and none is kept beside the suspended state"


async def test_a_piece_that_is_still_read_is_left(private: Path) -> None:
    async with StateTransport(private) as transport, StateTransport(private) as reader:
        spare = SpareMemory(Lending(transport))
        spare.most_bytes = 100 * MIB
        piece = await spare.take("solver", MIB)
        handle = await transport.set("solver", {"x": np.zeros(8)}, version=1, lent=piece)
        async with reader.mapped(handle) as tensors:
            spare.give_back(piece)
            other = await spare.take("judge", MIB)
            assert other != piece and transport.is_used(piece)
            del tensors
        assert not transport.is_used(piece)
        assert await spare.take("judge", MIB) == piece


async def test_spare_memory_makes_room_for_a_state_of_another_size(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with StateTransport(private) as transport:
        spare = SpareMemory(Lending(transport))
        spare.most_bytes = 100 * MIB
        spare.give_back(await spare.take("solver", 8 * MIB))
        with monkeypatch.context() as full:
            full.setattr(block, "free_bytes", lambda _: 12 * MIB - lent_bytes(transport))
            piece = await spare.take("judge", 10 * MIB)
            assert spare.size_bytes == 0 and piece.size_bytes == 10 * MIB == lent_bytes(transport)
            with pytest.raises(ArenaSpace, match="state judge: "):
                await spare.take("judge", 10 * MIB)
