"""The trainer actor: the facade that the orchestrator knows. A ``TrainingPool`` computes.

Leases and commits are messages, weights shared memory; the pool orders the computations of each policy, and the event
loop stays free meanwhile.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...core.actor import Actor, DeadActor, endpoint
from ...core.base.task_groups import first_error
from ...core.waits import OpenWaits, Wait
from ..errors import ProtocolViolation, SamplesUnreachable
from ..messages import WORK_TIMEOUT_S, MicroBatchTrained, PolicyStepped, Published, TrainerApi
from ..names import PolicyName, Step, Version
from ..spans import batch_number, record
from .arrival_order import ArrivalOrder
from .frozen_weights import FrozenWeights
from .pool.training_pool import TrainingPool
from .trainer_setup import TrainerSetup


class Trainer(Actor, TrainerApi):
    def __init__(self, setup: TrainerSetup) -> None:
        self._setup = setup
        self._store = setup.store
        self._pool: TrainingPool | None = None
        self._leases: dict[PolicyName, list[int]] = {policy: [] for policy in setup.policies}
        self._accumulated = dict.fromkeys(setup.policies, 0)
        """Samples that were trained since the last optimizer step."""
        self._arrivals = {policy: ArrivalOrder() for policy in setup.policies}
        self._waits = OpenWaits()
        self._committed = {policy: asyncio.Event() for policy in setup.policies}
        for committed in self._committed.values():
            committed.set()

    async def on_start(self) -> None:
        self._pool = self._create_pool()
        await self._pool.start()
        self._frozen = FrozenWeights(self._setup, self.system, self._pool.transport)

    async def on_stop(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def on_dead(self, dead: DeadActor) -> None:
        if dead.stopped:
            self._computing.actor_stopped(dead.actor)

    def statistics(self) -> Mapping[str, float]:
        """The pool's."""
        return {} if self._pool is None else self._pool.statistics()

    def progress(self) -> int:
        return 0 if self._pool is None else self._pool.progress()

    def waits(self) -> list[Wait]:
        """The pool's computations, and leases that the store has not granted."""
        return [*(() if self._pool is None else self._pool.waits()), *self._waits.current()]

    # ------------------------------------------------------------------ endpoints

    @endpoint
    async def sft(self, policy: PolicyName, first_batch: int, count: int) -> float:
        return await self._computing.sft(policy, first_batch, count)

    @endpoint
    async def publish(self, policy: PolicyName) -> Published:
        if policy in self._setup.frozen:
            return await self._frozen.publish(policy)
        await self._computing.end_sft(policy)
        return await self._computing.publish(policy)

    @endpoint
    async def keep(self, published: Published, file: str) -> None:
        await self._frozen.keep(published, Path(file))

    @endpoint
    async def publish_file(self, policy: PolicyName, version: Version, file: str) -> Published:
        return await self._frozen.publish_file(policy, version, Path(file))

    @endpoint
    async def train(self, policy: PolicyName, policy_version: int, count: int) -> MicroBatchTrained:
        # The store may answer a later lease first, or send its rows first if they are on another host, and a sum of
        # floats depends on its order. The pool knows when it has all that a computation needs: there the calls queue.
        with self._arrivals[policy].place() as place:
            begin = self.system.spans.now()
            with self._waits.open(f"{count} samples of {policy}", actor=self._store.name):
                leased = await self._store.within(WORK_TIMEOUT_S).lease(policy, policy_version, count)
            record(
                self.system.spans,
                self._store.name,
                "lease",
                begin,
                self.system.spans.now(),
                policy=policy,
                version=policy_version,
                micro_batch=batch_number(leased.fence),
            )
            self._leases[policy].append(leased.fence)
            try:
                trained = await self._computing.accumulate(policy, leased, place)
                self._accumulated[policy] += trained.samples
                return trained
            except SamplesUnreachable:
                place.leave()  # the calls behind do not wait until the store has the lease back
                self._leases[policy].remove(leased.fence)
                await self._store.within(WORK_TIMEOUT_S).give_back(policy, leased.fence)
                raise

    @endpoint
    async def optimizer_step(self, policy: PolicyName, step: Step) -> PolicyStepped:
        await self._wait_committed(policy)
        started = self.system.clock()
        stats, version = await self._computing.optimizer_step(policy, step)
        stepped = self.system.clock()
        self._check_whole(policy, step, stats.samples)
        fences, self._leases[policy] = self._leases[policy], []
        committing = self._commit(policy, fences, version)
        if self._setup.pool is None:
            with first_error():
                async with asyncio.TaskGroup() as group:
                    group.create_task(committing)
                    publishing = group.create_task(self._computing.publish(policy))
            published = publishing.result()
        else:
            # Weights don't wait for the state to be whole: that is copied beside the next rollout. Until then the step
            # may have to be computed again, with the same rows.
            self._committed[policy].clear()
            self.background(committing, f"commit {policy}")
            published = await self._computing.publish(policy)
        publish_s = self.system.clock() - stepped
        measured = {"optimizer_s": stepped - started, **self._computing.figures(policy)}
        moves = self._computing.take_moves()
        return PolicyStepped(
            published, replace(stats, figures={**stats.figures, **measured}), publish_s, moves
        )

    def _check_whole(self, policy: PolicyName, step: Step, samples: int) -> None:
        """Raises ProtocolViolation if the step has other samples than those that were trained for it: no later figure
        would show that a part of a gradient was lost on its way between slots."""
        accumulated, self._accumulated[policy] = self._accumulated[policy], 0
        if samples != accumulated:
            raise ProtocolViolation(
                f"optimizer step {step} of {policy} has {samples} samples, and {accumulated} were trained for it"
            )

    @endpoint
    async def save(self, policy: PolicyName, folder: str) -> None:
        await self._wait_committed(policy)
        await self._computing.save(policy, Path(folder))

    # ------------------------------------------------------------------ the pool

    @property
    def _computing(self) -> TrainingPool:
        assert self._pool is not None, "calls come after the start"
        return self._pool

    def _create_pool(self) -> TrainingPool:
        # Imported here: a shared pool computes in other processes, and this one does not need their libraries.
        if self._setup.pool is None:
            from .pool.static_pool import StaticPool

            return StaticPool(self._setup, self.system, self.background)
        from .pool.shared_pool import SharedPool

        return SharedPool(self._setup, self._setup.pool, self.system, self.background, self.watch)

    async def _commit(self, policy: PolicyName, fences: list[int], version: int) -> None:
        await self._computing.saved(policy)
        with self._waits.open(f"the commit of the last step's samples of {policy}", actor=self._store.name):
            await self._store.within(WORK_TIMEOUT_S).commit(policy, fences, version)
        self._committed[policy].set()
        self._computing.rows_committed(policy)

    async def _wait_committed(self, policy: PolicyName) -> None:
        """Returns when the samples of the policy's last optimizer step are committed."""
        # Named where it is waited for: by the pool until the state is whole, and then by the commit.
        await self._committed[policy].wait()
