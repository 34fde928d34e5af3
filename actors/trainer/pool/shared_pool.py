"""The trainer's side of a pool of slot workers: carries out the decisions of ``allocate.py``.

    decision    calls at each of the gang's slots             then reports to the allocator
    Bind        build, or resume unless it was prefetched          bound
    Run         the policy's next computation, then set_weights    ended
                if it has changed the base part
    Suspend     suspend                                            suspended
    Prefetch    resume, or prefetch if there are several ranks     prefetched
    Drop        drop                                               dropped

Each decision is carried out by a task of its own. After a computation that has changed the base part, the rest of it
is copied to the host's memory by ``set_rest``, beside what follows: the weights are published before. A Suspend and the
next such computation wait for that copy, and so does the commit of the samples (``saved``).

When a slot worker was lost, and its process is dead (``pool_slots.py``), a policy that has computed there since its
state was whole returns to its base part, and the computations since then wait again, in their order, an optimizer step
whose weights are published among them; the leases of their samples stand. The allocator binds it to other slots, or to
the same when its next life has enlisted. So a policy's state is whole at any moment, and each of its samples counts
once.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ....core.base.task_groups import first_error
from ....core.errors import ActorDead, FlexmarlError
from ....core.ref import ActorRef
from ....core.system import ActorSystem
from ....core.telemetry import get_logger
from ....core.waits import Wait
from ....transport.remote.bulk import Bulk
from ....transport.state import StateTransport
from ...figures import Numbers
from ...messages import LeasedBatch, MicroBatchTrained, Published, StepStats
from ...names import PolicyName, SlotName, Step, Version
from ...run_events import SlotLost
from ..arrival_order import Place
from ..trainer_setup import SharedPoolSetup, TrainerSetup
from .allocate import Allocator
from .gangs import Bind, Decision, Drop, Prefetch, Run, Suspend
from .lender import LENDER
from .policy_work import Computation, PolicyWork
from .pool_record import MoveTimes
from .pool_slots import HostedGang, PoolSlots, SlotCall, SlotListener
from .pool_slots import SlotLost as LostCall
from .rank_memory import Loss
from .state_hosts import StateHost, StateHosts
from .state_moves import StateMoves
from .training_pool import TrainingPool

T = TypeVar("T")
log = get_logger(__name__)


class SharedPool(TrainingPool, SlotListener):
    """See ``TrainingPool``. ``system``: the trainer's. ``background`` and ``watch``: as of ``Actor``. One class of more
    than 300 lines: each loss, of a slot or a host, meets all decisions that are being carried out."""

    def __init__(
        self,
        setup: TrainerSetup,
        pool: SharedPoolSetup,
        system: ActorSystem,
        background: Callable[[Coroutine[Any, Any, None], str], None],
        watch: Callable[[ActorRef[Any]], None],
    ) -> None:
        self._policies = list(setup.policies)
        self._ranks = {name: policy.trainer.most_ranks for name, policy in setup.policies.items()}
        self._fewest_ranks = {name: policy.trainer.fewest_ranks for name, policy in setup.policies.items()}
        self._replica_sizes = {
            name: policy.trainer.replica_size
            for name, policy in setup.policies.items()
            if policy.trainer.replicas > 1
        }
        self._replicas_of = {name: policy.trainer.replicas_of for name, policy in setup.policies.items()}
        fewest_parts = {name: policy.trainer.fewest_parts for name, policy in setup.policies.items()}
        self._pool = pool
        self._clock = system.clock
        self._background = background
        self._transport = StateTransport(system.directory, bulk=Bulk.of(system, encrypted=setup.encrypted))
        hosts = StateHosts(
            self._transport, system, background, encrypted=setup.encrypted, lost=self._host_lost
        )
        self._slots = PoolSlots(pool, self, hosts, system, background, watch)
        self._moves = StateMoves(pool, self._slots, fewest_parts, self._hosts, system.clock)
        self._memory = self._moves.memory
        self._move_times = MoveTimes(system.clock)
        self._allocator: Allocator | None = None
        self._gangs: dict[PolicyName, HostedGang] = {}
        self._work = {policy: PolicyWork(system.clock) for policy in setup.policies}
        self._stepped: dict[PolicyName, Computation] = {}
        self._failed: dict[PolicyName, FlexmarlError] = {}
        """Policies that can't continue, with the reason: the run begins again from its newest checkpoint, or ends."""

    # ------------------------------------------------------------------ TrainingPool

    async def start(self) -> None:
        await self._transport.__aenter__()
        self._background(self._moves.send_news(), "events")
        self._moves.clear_disk()
        slots, config = await self._slots.start(), self._pool.config
        hosts = {slot: self._slots.host_of(slot).name for slot in slots}
        self._allocator = Allocator(
            slots, self._ranks, config, self._fewest_ranks, self._replica_sizes, hosts
        )
        with first_error():
            async with asyncio.TaskGroup() as group:
                for policy in self._policies:
                    group.create_task(self.bind(policy))

    async def bind(self, policy: PolicyName) -> None:
        """Has the policy bound, after all its earlier computations; it is built if it is the first time."""

        async def run(_gang: HostedGang) -> None:
            """Nothing is computed."""

        await self._compute(policy, Computation("bind", run))

    async def sft(self, policy: PolicyName, first_batch: int, count: int) -> float:
        async def run(gang: HostedGang) -> float:
            return await self._first(gang, lambda slot, life, _: slot.sft(life, policy, first_batch, count))

        loss: float = await self._compute(policy, Computation("sft", run, changes_base=True))
        return loss

    async def end_sft(self, policy: PolicyName) -> None:
        async def run(gang: HostedGang) -> None:
            await self._slots.at(gang, lambda slot, life, _: slot.end_sft(life, policy))

        await self._compute(policy, Computation("end_sft", run, changes_base=True))

    async def accumulate(
        self, policy: PolicyName, leased: LeasedBatch, place: Place | None = None
    ) -> MicroBatchTrained:
        async def run(gang: HostedGang) -> MicroBatchTrained:
            return await self._first(gang, lambda slot, life, _: slot.accumulate(life, policy, leased))

        if place is not None:
            await place.wait_turn()
        computation = Computation("accumulate", run, repeated=True)
        trained: MicroBatchTrained = await self._compute(policy, computation)
        return trained

    async def optimizer_step(self, policy: PolicyName, step: Step) -> tuple[StepStats, Version]:
        async def run(gang: HostedGang) -> tuple[StepStats, Version]:
            stepped = await self._first(gang, lambda slot, life, _: slot.optimizer_step(life, policy, step))
            return stepped.stats, Version(stepped.version)

        computation = self._stepped[policy] = Computation("optimizer_step", run, changes_base=True)
        stepped: tuple[StepStats, Version] = await self._compute(policy, computation)
        return stepped

    async def publish(self, policy: PolicyName) -> Published:
        first = self._memory[policy][0]
        assert first.published is not None, "start has set the first"
        return Published(policy, Version(first.published.version), first.published, first.probe)

    async def saved(self, policy: PolicyName) -> None:
        await self._stepped[policy].saved

    async def save(self, policy: PolicyName, folder: Path) -> None:
        async def run(gang: HostedGang) -> None:
            await self._slots.at(gang, lambda slot, life, _: slot.save(life, policy, str(folder)))

        await self._compute(policy, Computation("save", run))

    @property
    def transport(self) -> StateTransport:
        return self._transport

    def rows_committed(self, policy: PolicyName) -> None:
        """The slot workers notice it themselves."""

    def actor_stopped(self, name: str) -> None:
        self._slots.stopped(name)

    async def close(self) -> None:
        await self._transport.close()
        self._moves.clear_disk()

    def figures(self, policy: PolicyName) -> Numbers:
        return self._moves.records[policy].take(self._decider.seconds(policy))

    def take_moves(self) -> list[tuple[float, float]]:
        return self._move_times.take()

    def waits(self) -> list[Wait]:
        """The computations under way, policies that wait for slots, and moves that wait for others."""
        now = self._clock()
        waits = self._moves.waits()
        for policy, work in self._work.items():
            if work.running is not None and (gang := self._gangs.get(policy)) is not None:
                what = f"{work.running.name} of {policy} on {', '.join(gang.slots)}"
                waits.append(Wait(what, now - work.since, actor=gang.slots[0]))
            elif work.is_waiting:
                waits.append(Wait(f"slots for {policy}", now - work.since, actor="slots"))
        return waits

    def progress(self) -> int:
        return sum(work.ended for work in self._work.values())

    def statistics(self) -> Mapping[str, float]:
        """Numbers of the transport, as ``transport_...``."""
        return self._transport.statistics().numbers()

    async def _first(self, gang: HostedGang, call: SlotCall[T]) -> T:
        """The first rank's result of a call at all ranks: those of the others are the same."""
        return (await self._slots.at(gang, call))[0]

    async def _compute(self, policy: PolicyName, computation: Computation) -> Any:
        """The result of ``computation``, after all earlier ones of the policy."""
        if policy in self._failed:
            raise self._failed[policy]
        self._work[policy].add(computation)
        self._event(lambda now: self._decider.ready(policy, now))
        return await computation.done

    # ------------------------------------------------------------------ decisions

    @property
    def _decider(self) -> Allocator:
        assert self._allocator is not None, "computations come after the start"
        return self._allocator

    def _event(self, report: Callable[[float], Iterable[Decision]]) -> None:
        """Reports an event to the allocator, and begins to carry out its decisions."""
        for decision in report(self._clock()):
            policy, kind = decision.policy, type(decision).__name__
            if policy in self._failed:
                continue  # the allocator still counts its computations, and the trainer ends
            log.debug("pool", decision=kind, policy=policy, reason=decision.reason)
            gang = self._gang_for(decision)
            gang.is_dropped |= isinstance(decision, Drop)
            if isinstance(decision, Run):
                gang.has_computed = True
                work = self._run(policy, gang, self._work[policy].begin())
            else:
                work = self._move(decision, gang)
            self._background(self._unless_lost(work), f"{kind} {policy}")

    async def _unless_lost(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except LostCall as lost:
            await self._slots.lose(lost)

    def _gang_for(self, decision: Decision) -> HostedGang:
        gang = self._gangs.get(decision.policy)
        if gang is None:
            assert isinstance(decision, Bind | Prefetch | Drop), "the others are of a policy that is bound"
            replicas = self._replicas_of[decision.policy](len(decision.slots))
            gang = self._slots.gang(decision.slots, replicas, is_torn=isinstance(decision, Drop))
            self._gangs[decision.policy] = gang
            self._memory.is_in(decision.policy)
        return gang

    def _hosts(self, policy: PolicyName, gang: HostedGang) -> bool:
        """None of the gang's slots was lost, or is about to be."""
        return self._gangs.get(policy) is gang and not gang.is_cut

    async def _move(self, decision: Decision, gang: HostedGang) -> None:
        """Carries out a decision other than Run."""
        policy, allocator = decision.policy, self._decider
        report: Callable[[PolicyName, float], list[Decision]]
        try:
            with self._move_times.move():
                match decision:
                    case Bind():
                        await self._moves.load(policy, gang, decision.reason)
                        report = allocator.bound
                    case Prefetch():
                        await self._moves.prefetch(policy, gang, decision.reason)
                        report = allocator.prefetched
                    case Suspend():
                        await self._moves.suspend(policy, gang, decision.reason)
                        homes = [host.name for host in self._memory.hosts_of(policy)]
                        report = partial(allocator.suspended, homes=homes)
                    case _:
                        await self._moves.drop(policy, gang)
                        report = allocator.dropped
            error = None
        except FlexmarlError as raised:
            error = raised
        if not self._hosts(policy, gang):
            return  # one of its slots was lost meanwhile
        if error is not None:
            self._fail(policy, error)  # it has no state on any slot
            return
        if isinstance(decision, Suspend | Drop):
            del self._gangs[policy]
        self._event(partial(report, policy))
        if isinstance(decision, Suspend):
            self._copy_again(policy)
        if isinstance(decision, Suspend | Drop) and policy not in self._gangs:
            await self._memory.is_out(policy)

    async def _run(self, policy: PolicyName, gang: HostedGang, computation: Computation) -> None:
        work = self._work[policy]
        try:
            if computation.changes_base:
                await self._moves.wait_saved(gang)
            result = await computation.run(gang)
            # After a loss they are published already, and instances read them. On a device whose sums have no fixed
            # order the repeated step may differ from them by rounding.
            if computation.changes_base and not computation.done.done():
                began = self._clock()
                await self._moves.set_weights(policy, gang)
                self._moves.records[policy].gather_s += self._clock() - began
            error = None
        except FlexmarlError as raised:
            result, error = None, raised
        if not self._hosts(policy, gang) or work.running is not computation:
            return  # one of its slots was lost meanwhile, and it waits again; or the copy before has failed
        if error is not None:
            if computation.done.done():  # it was trained before its slot was lost: the step can't be repeated
                self._fail(policy, error)
                return
            computation.fail(error)
        work.end()
        computation.succeed(result)
        if computation.changes_base and not computation.failed:
            gang.has_computed = False
            gang.is_saved.clear()
            self._background(self._unless_lost(self._save(policy, gang)), f"Save {policy}")
        even_ranks = result.even_ranks if isinstance(result, MicroBatchTrained) else math.inf
        self._event(
            partial(self._decider.ended, policy, is_typical=computation.repeated, even_ranks=even_ranks)
        )

    async def _save(self, policy: PolicyName, gang: HostedGang) -> None:
        try:
            await self._moves.save(policy, gang)
        except FlexmarlError as error:
            if self._hosts(policy, gang):
                self._fail(policy, error)  # without a whole state the step's samples can't be committed
            return
        finally:
            gang.is_saved.set()
        if self._hosts(policy, gang):
            self._work[policy].save()
            self._copy_again(policy)
            await self._memory.free_excess()

    def _fail(self, policy: PolicyName, error: FlexmarlError) -> None:
        """The run can't continue: all computations of the policy, also later ones, raise ``error``."""
        self._failed.setdefault(policy, error)
        if not self._work[policy].fail(error):
            # Not left to its next computation: that may come after those of policies that wait for its slots, which it
            # does not leave any more.
            self._background(_end_trainer(error), f"loss of {policy}")

    def _copy_again(self, policy: PolicyName) -> None:
        self._background(self._moves.copy_again(policy), f"second copy of {policy}")

    # ------------------------------------------------------------------ pool_slots.SlotListener

    def slot_joined(self, slot: SlotName) -> None:
        host = self._slots.host_of(slot).name
        self._event(lambda now: self._decider.slot_joined(slot, now, host))

    def slot_lost(self, slot: SlotName, reason: str) -> None:
        gangs = {policy: gang for policy, gang in self._gangs.items() if slot in gang.remaining}
        for gang in gangs.values():
            gang.remaining.remove(slot)
        lost = [policy for policy, gang in gangs.items() if not (gang.is_dropped and gang.remaining)]
        again = {policy: self._fall_back(policy) for policy in lost}
        repeated = {
            policy: sum(computation.repeated for computation in computations)
            for policy, computations in again.items()
        }
        self._moves.report(SlotLost(slot, reason, ", ".join(lost), sum(repeated.values())))
        self._event(partial(self._decider.slot_lost, slot))
        for policy, computations in again.items():
            self._moves.records[policy].repeated += repeated[policy]
            for _ in computations:
                self._event(partial(self._decider.ready, policy))

    def _host_lost(self, host: StateHost, reason: str) -> None:
        """A host is lost, with its slots and the states that lay there."""
        for policy in self._policies:
            gang = self._gangs.get(policy)
            if gang is not None and not gang.is_dropped:  # else what remains of it still has to be dropped
                gang.is_cut |= any(self._slots.host_of(slot) is host for slot in gang.remaining)
            loss = self._memory.host_lost(policy, host)
            if loss is Loss.BASE:
                lost = f"its host {host.name} is lost ({reason}), and with it the only whole state of policy {policy}"
                self._fail(policy, ActorDead(LENDER, lost))
            elif loss is not Loss.NOTHING:
                self._continue_elsewhere(policy, gang, loss)
            self._copy_again(policy)
        self._slots.lose_host(host, reason)

    def _continue_elsewhere(self, policy: PolicyName, gang: HostedGang | None, loss: Loss) -> None:
        """The policy's state is on other hosts now, perhaps without its step part."""
        if gang is None or gang.is_dropped:
            if loss is Loss.STEP:
                again = self._work[policy].lose()
                self._moves.records[policy].repeated += sum(computation.repeated for computation in again)
                for _ in again:
                    self._event(partial(self._decider.ready, policy))
        elif loss is Loss.STEP:
            gang.has_computed = True  # what its slots have is more than the state in memory
        if gang is not None and not (gang.is_loaded or gang.is_dropped or gang.is_cut):
            # It is reading what is gone, or has read a step part that will be trained again.
            reason = "its state lay on a host that is lost"
            for slot, life in zip(gang.slots, gang.lives, strict=True):
                self._background(self._slots.lose(LostCall(slot, life, reason)), f"loss of {slot}")

    def _fall_back(self, policy: PolicyName) -> list[Computation]:
        """The policy has lost a slot; returns the computations that wait again."""
        gang = self._gangs.pop(policy)
        self._moves.stop_taking(policy)
        if policy in self._failed or not (gang.has_computed or self._work[policy].is_unsaved):
            return []
        for rank in self._memory[policy]:
            rank.step_was_lost()
        return self._work[policy].lose()


async def _end_trainer(error: FlexmarlError) -> None:
    raise error
