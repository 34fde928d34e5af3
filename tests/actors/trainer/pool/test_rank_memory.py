"""Memory of a rank whose calls to a host are overtaken: by the next gang of its policy, or by the loss of the host."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from flexmarl.actors.messages import Moved, SavedRest, SavedWeights, StateBytes, Suspended
from flexmarl.actors.names import PolicyName
from flexmarl.actors.trainer.pool.host_memory import HostMemory
from flexmarl.actors.trainer.pool.lender import Lending
from flexmarl.actors.trainer.pool.rank_memory import Loss, RankMemory
from flexmarl.actors.trainer.pool.state_hosts import StateHost, StateHosts
from flexmarl.core.actor import endpoint
from flexmarl.core.errors import ActorDead
from flexmarl.core.system import ActorSystem
from flexmarl.transport.handle import LentMemory
from flexmarl.transport.state import StateTransport

from ....patience import PATIENCE_S

NEEDED = StateBytes(weights=64, rest=64, step=64, base=128, on_slot=192, rows={}, live={})
STATE = {"x": np.zeros(8, np.float32)}
SOLVER = PolicyName("solver")


class HeldUp(Lending):
    """A lender whose answers to ``held`` wait until ``answers`` is set; ``asked``: such a call has come."""

    def __init__(self, transport: StateTransport) -> None:
        super().__init__(transport)
        self.held = ""
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def hold(self, call: str) -> None:
        if self.held == call:
            self.asked.set()
            await self.answers.wait()

    @endpoint
    async def lend(self, key: str, size_bytes: int, side: int | None = None) -> LentMemory:
        await self.hold("lend")
        return await super().lend(key, size_bytes, side)

    @endpoint
    async def is_used(self, lent: LentMemory) -> bool:
        await self.hold("is_used")
        return True

    @endpoint
    async def store_away(self, lent: LentMemory, file: str) -> None:
        await super().store_away(lent, file)
        await self.hold("store_away")

    @endpoint
    async def bring_back(self, lent: LentMemory, file: str) -> LentMemory:
        piece = await super().bring_back(lent, file)
        await self.hold("bring_back")
        return piece


@asynccontextmanager
async def rank_on_host(private: Path) -> AsyncIterator[tuple[RankMemory, StateHost, HeldUp, StateTransport]]:
    """A rank with a whole state on a host, whose lender may be held up."""
    async with StateTransport(private) as transport:
        lender = HeldUp(transport)
        host = StateHost("one", lender)
        rank = RankMemory(StateHost("the head", Lending(transport), is_head=True), "solver-0", NEEDED)
        lent = await rank.for_weights()
        rank.weights_were_set(SavedWeights(await transport.set("x/weights", STATE, version=1, lent=lent), ()))
        lent = await rank.for_rest(host)
        rank.rest_was_set(SavedRest(await transport.set("x/rest", STATE, version=1, lent=lent), {}))
        lent = await rank.for_step(host)
        step = await transport.set("x/step", STATE, version=1, lent=lent)
        rank.was_suspended(Suspended(step, {}, Moved(0, "memory")))
        yield rank, host, lender, transport


async def test_a_gang_that_lost_a_slot_does_not_take_the_place_of_the_next_one(private: Path) -> None:
    async with rank_on_host(private) as (rank, host, lender, transport):
        other = StateHost("two", Lending(transport))
        lender.held = "lend"
        before = asyncio.create_task(rank.for_rest(host))
        await lender.asked.wait()
        after = asyncio.create_task(rank.for_rest(other))
        await asyncio.sleep(0)
        lender.answers.set()
        async with asyncio.timeout(PATIENCE_S):
            lent_before, lent = await before, await after
        rank.rest_was_set(SavedRest(await transport.set("x/rest", STATE, version=2, lent=lent), {}))
        assert [(part, piece.host, piece.lent) for part, piece in rank.pieces()] == [("rest", other, lent)]
        assert lent_before in host.spare._pieces, "no state lies in it, and none may be noted there"


@pytest.mark.parametrize("seconds", [["rest"], ["rest", "step"]])
async def test_a_host_that_is_lost_while_it_is_asked_for_memory_of_a_step(
    private: Path, seconds: list[str]
) -> None:
    async with rank_on_host(private) as (rank, host, lender, transport):
        lender.held = "is_used"
        other = StateHost("two", Lending(transport))
        suspending = asyncio.create_task(rank.for_step(host))
        await lender.asked.wait()
        # Its answer is on the way when it is lost.
        for part, piece, handle in list(rank.missing()):
            if part in seconds:
                await rank.copy_again(part, piece, handle, other)
        assert rank.host_lost(host) is (Loss.MOVED if "step" in seconds else Loss.STEP)
        lender.answers.set()
        async with asyncio.timeout(PATIENCE_S):
            lent = await suspending
        assert [piece.host for part, piece in rank.pieces() if part == "rest"] == [other]
        assert len(other.spare._pieces) == ("step" in seconds), "memory of the step part before is spare"
        assert lent not in host.spare._pieces


@pytest.mark.parametrize("has_second", [True, False])
async def test_a_host_that_is_lost_when_it_has_stored_a_state_away(
    private: Path, tmp_path: Path, has_second: bool
) -> None:
    async with rank_on_host(private) as (rank, host, lender, transport):
        other = StateHost("two", Lending(transport))
        for part, piece, handle in list(rank.missing()) if has_second else ():
            await rank.copy_again(part, piece, handle, other)
        lender.held = "store_away"
        storing = asyncio.create_task(rank.store_away(host, tmp_path))
        await lender.asked.wait()
        assert rank.host_lost(host) is (Loss.MOVED if has_second else Loss.BASE)
        lender.answers.set()
        async with asyncio.timeout(PATIENCE_S):
            await storing
        assert {piece.host for _, piece in rank.pieces()} == ({other} if has_second else set())
        assert not await rank.bring_back(), "no part of it is on the disk of a host that is left"


async def test_a_host_that_is_lost_when_it_has_brought_a_state_back(private: Path, tmp_path: Path) -> None:
    async with rank_on_host(private) as (rank, host, lender, _):
        await rank.store_away(host, tmp_path)
        lender.held = "bring_back"
        returning = asyncio.create_task(rank.bring_back())
        await lender.asked.wait()
        assert rank.host_lost(host) is Loss.BASE
        lender.answers.set()
        with pytest.raises(ActorDead, match="the base part of a state was lost with its host"):
            async with asyncio.timeout(PATIENCE_S):
                await returning


async def test_a_base_part_that_is_lost_while_its_policy_changes_its_ranks(
    private: Path, system: ActorSystem
) -> None:
    async with rank_on_host(private) as (rank, host, _, transport):
        hosts = StateHosts(transport, system, lambda work, name: work.close(), encrypted=True)
        memory = HostMemory(hosts, [SOLVER], 1 << 30, private / "suspended")
        memory._of[SOLVER] = [rank]
        ranks = memory.other_ranks(SOLVER, [NEEDED, NEEDED])
        rests = []
        for other in ranks:
            lent = await other.for_rest(hosts.head)
            rests.append(await transport.set("x/rest", STATE, version=1, lent=lent))
        assert memory.host_lost(SOLVER, host) is Loss.BASE
        with pytest.raises(ActorDead, match="the base part of a state was lost with its host"):
            memory.was_resharded(SOLVER, ranks, rests)
        assert memory[SOLVER] == [rank], "the ranks before are kept: the run ends"


async def test_a_step_part_follows_its_slot_to_the_other_side_if_memory_is_spare_there(private: Path) -> None:
    async with rank_on_host(private) as (rank, _, _, transport):
        host = StateHost("two", Lending(transport))
        for side in (0, 1):
            host.spare.give_back(await host.spare.lend("other", NEEDED.step, side))
        sides = [(await rank.for_step(host, side)).side for side in (0, 1, 0, 0)]
        assert sides == [0, 1, 0, 0] and len(host.spare._pieces) == 1
