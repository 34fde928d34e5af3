"""The memory of a shared pool's hosts for its training states: it outlives the slot workers.

A state lies on the host where its gang ran, each rank's part on the host of its slot. Per policy, with its bytes for a
parameter in bfloat16 over float32 (of one rank in float32: weights 2 x 4, rest 8, step 4):

    weights   2 x 2    on the head, whose loss ends the run: two pieces, written in turn: the two newest versions, as
                       they are published
    rest          12   one piece: the base part that the last optimizer step left
    step           4   one piece from a suspension in mid-step to the end of that step
    second   12 or 16  copies of the rest and the step on another host, unless they lie on the head

    optimizer step     the other piece --> the newer weights       published; the state is the older one, whole
    beside the next    a spare piece ----> the newer rest          the same
    all ranks' newer rests are whole       the state is the newer; the older rest's piece and the step's are spare
    suspension         a spare piece ----> the step part
    after both         another host -----> the second copy         beside the computations; no call waits for it
    a slot is lost     the state is the rest, its step part is forgotten; a newer rest that is not whole is written
                       again, to the same piece
    a host is lost     the second copies of what lay there are the state. Without one of the step, the step part is
                       forgotten; without one of the rest, the state is lost, and the run begins again from its newest
                       checkpoint

Each sample counts once in all of these: a state that takes the place of another is the same, bit for bit; the samples
of a step part that is forgotten are trained again; and a run that begins again has all states, and no samples, as the
checkpoint has them.

Spare pieces are those of a host for all policies (``spare_memory.py``), and states are copied to a host one after the
other (``state_moves.py``): the peak of a host is once the states of the policies that ran there last, and once the rest
of the largest.

Under pressure second copies are freed. Then the rest and the step part of suspended policies go to files, and come back
before the policy is resumed. So a slot worker that dies at any moment leaves either the whole old or the whole new base
part.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ....core.base.texts import text_of
from ....core.errors import FlexmarlError
from ....core.telemetry import get_logger
from ....transport.handle import StateHandle
from ...messages import HostState, StateBytes
from ...names import PolicyName
from .rank_memory import Loss, Piece, RankMemory
from .state_hosts import StateHost, StateHosts

log = get_logger(__name__)


class HostMemory:
    """The memory of all policies on all hosts, and its limit."""

    def __init__(
        self,
        hosts: StateHosts,
        policies: Sequence[PolicyName],
        limit_bytes: float,
        folder: Path,
    ) -> None:
        """``limit_bytes``: on each host, of states of policies without slots, but for their published weights, of
        second copies, and of spare pieces, which are freed before a state is stored away. ``folder``: on a disk, for
        the other states; made at its first use."""
        self._hosts = hosts
        self._of: dict[PolicyName, list[RankMemory]] = {policy: [] for policy in policies}
        self._limit_bytes, self._folder = limit_bytes, folder
        self._most_spare_bytes = 0
        self._out: dict[PolicyName, None] = {}
        """Policies without slots, the one suspended first first."""
        self._relieving = asyncio.Lock()
        self._moving = {policy: asyncio.Lock() for policy in policies}
        hosts.joined = self._limit
        self._limit(hosts.head)

    def _limit(self, host: StateHost) -> None:
        host.spare.most_bytes = self._most_spare_bytes
        host.spare.room_bytes = lambda: self._limit_bytes - self._out_bytes(host)

    def __getitem__(self, policy: PolicyName) -> list[RankMemory]:
        """The memory of each of its ranks."""
        return self._of[policy]

    async def was_built(self, policy: PolicyName, needed: Sequence[StateBytes]) -> None:
        """The policy has these ranks, whose memory is allocated at its first use."""
        before = self._of[policy]
        self._of[policy] = [
            RankMemory(self._hosts.head, f"{policy}-{rank}", size) for rank, size in enumerate(needed)
        ]
        # Each that is taken in a swap is there, once it was needed for the first time.
        needs = [[rank.needed for rank in ranks] for ranks in self._of.values()]
        largest_rest = max(sum(size.rest for size in sizes) for sizes in needs)
        self._most_spare_bytes = largest_rest + sum(size.step for sizes in needs for size in sizes)
        for host in self._hosts.all:
            host.spare.most_bytes = self._most_spare_bytes
        for old in before:  # a slot was lost before the first state was whole
            await old.free()

    def other_ranks(self, policy: PolicyName, needed: Sequence[StateBytes]) -> list[RankMemory]:
        """Memory for another number of ranks, beside the present one. Its base part has all weights in ``rest``."""
        return [
            RankMemory(self._hosts.head, f"{policy}-{rank}", replace(size, rest=size.base))
            for rank, size in enumerate(needed)
        ]

    def was_resharded(
        self, policy: PolicyName, ranks: list[RankMemory], rests: Sequence[StateHandle]
    ) -> list[RankMemory]:
        """The state of the policy is in ``ranks`` from now on, in ``rests``, and has no step part. Returns the ranks
        before, whose memory is to be freed. Raises ActorDead, and changes nothing, if their base part was lost."""
        before = self._of[policy]
        for rank in before:
            rank.check_base()
        self._of[policy] = ranks
        for rank, rest in zip(ranks, rests, strict=True):
            rank.continue_from(before[0], rest)
        ranks[0].take_weights_of(before[0])
        return before

    async def free(self, ranks: Sequence[RankMemory]) -> None:
        """Frees all memory of ``ranks``, after their policy has others."""
        for rank in ranks:
            await rank.free()

    def states(self, policy: PolicyName) -> list[HostState] | None:
        """The whole state of each rank; None before the first."""
        states = [rank.state for rank in self._of[policy] if rank.state is not None]
        return states if states and len(states) == len(self._of[policy]) else None

    def hosts_of(self, policy: PolicyName) -> list[StateHost]:
        """Those that its present state lies on, also on their disks."""
        return list(dict.fromkeys(host for rank in self._of[policy] for host in rank.hosts()))

    # ------------------------------------------------------------------ second copies

    async def copy_again(self, policy: PolicyName) -> None:
        """Has second copies of all parts of the policy's state that lie on another host than the head, as far as other
        hosts have room. Raises the errors of ``RankMemory.copy_again``."""
        for rank in self._of[policy]:
            for part, piece, handle in list(rank.missing()):
                if (host := self._second_host(piece)) is None:
                    continue
                try:
                    await rank.copy_again(part, piece, handle, host)
                except FlexmarlError:
                    if rank.handle(part) == handle:  # else a newer state took its place, and is copied next
                        raise

    def _second_host(self, piece: Piece) -> StateHost | None:
        """The one with the least memory lent, of those with room."""
        size_bytes = piece.lent.size_bytes
        fitting = (
            host
            for host in self._hosts.all
            if host is not piece.host and self._out_bytes(host) + size_bytes <= self._limit_bytes
        )
        return min(fitting, key=lambda host: host.spare.lent_bytes - host.spare.size_bytes, default=None)

    async def free_seconds(self, host: StateHost) -> bool:
        """Frees all second copies on ``host``, since its memory is needed for first ones; False if there are none."""
        pieces = [piece for ranks in self._of.values() for rank in ranks for piece in rank.drop_seconds(host)]
        await host.spare.free(pieces)
        return bool(pieces)

    def host_lost(self, policy: PolicyName, host: StateHost) -> Loss:
        """See ``RankMemory.host_lost``: the worst of all ranks, for all of them."""
        losses = [rank.host_lost(host) for rank in self._of[policy]]
        loss = max(losses, key=lambda loss: loss.value, default=Loss.NOTHING)
        if loss is Loss.STEP:
            for rank in self._of[policy]:
                rank.step_was_lost()
        return loss

    # ------------------------------------------------------------------ the limit

    async def free_excess(self) -> None:
        """Frees spare memory that there is no room for any more. A host that is lost meanwhile has none."""
        for host in self._hosts.all:
            try:
                await host.spare.free_excess()
            except FlexmarlError:
                await self._hosts.check(host)
                if not host.is_lost:
                    raise

    def is_in(self, policy: PolicyName) -> None:
        """The policy is about to get slots: its state stays in memory."""
        self._out.pop(policy, None)

    async def bring_back(self, policy: PolicyName) -> bool:
        """Has the policy's state in memory; True if it was on the disk. Raises OSError, RemoteError, ArenaSpace."""
        async with self._moving[policy]:
            return any([await rank.bring_back() for rank in self._of[policy]])

    async def is_out(self, policy: PolicyName) -> None:
        """The policy has no slots any more. States beyond the limit are stored away, the one suspended first first.

        If the disk has no room, the state stays in memory, and a warning is logged.
        """
        self._out[policy] = None
        async with self._relieving:
            await self.free_excess()
            for host in self._hosts.all:
                await self._relieve(host)

    async def _relieve(self, host: StateHost) -> None:
        if self._out_bytes(host) > self._limit_bytes:
            await self.free_seconds(host)
            await host.spare.free_excess()
        for other in list(self._out):
            if self._out_bytes(host) <= self._limit_bytes:
                return
            async with self._moving[other]:
                if other in self._out:  # else it is about to get slots
                    await self._store_away(other, host)

    async def _store_away(self, policy: PolicyName, host: StateHost) -> None:
        try:
            for rank in self._of[policy]:
                await rank.store_away(host, self._folder)
        except (OSError, FlexmarlError) as error:
            log.warning(
                "no room on the disk for a suspended state, which stays in memory",
                policy=policy,
                size_bytes=sum(rank.host_bytes(host) for rank in self._of[policy]),
                folder=str(self._folder),
                error=text_of(error),
            )

    def _out_bytes(self, host: StateHost) -> int:
        """Bytes of ``host``: of states of policies without slots, and of second copies."""
        of_states = sum(rank.host_bytes(host) for policy in self._out for rank in self._of[policy])
        return of_states + sum(rank.second_bytes(host) for ranks in self._of.values() for rank in ranks)
