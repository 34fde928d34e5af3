"""All policies, resident in the trainer's process: one computation after the other, like a slot that never suspends."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ....core.base.task_groups import first_error
from ....core.system import ActorSystem
from ....core.waits import Wait
from ....transport.device_memory import find_devices
from ....transport.remote.bulk import Bulk
from ....transport.state import StateTransport, payload_bytes
from ...messages import LeasedBatch, MicroBatchTrained, Published, StepStats
from ...names import PolicyName, Step, Version
from ..arrival_order import Place
from ..backends.policy_backend import PolicyBackend
from ..trainer_setup import TrainerSetup
from .host_memory import TRANSFER_TIMEOUT_S
from .hosted_policies import HostedPolicies, reader_of
from .training_pool import TrainingPool


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights to publish. ``tensors`` may alias the live weights: publish them before the next step."""

    version: int
    tensors: Mapping[str, Any]


class StaticPool(TrainingPool):
    """See ``TrainingPool``. The event loop stays free during a computation."""

    def __init__(self, setup: TrainerSetup, system: ActorSystem) -> None:
        """``system``: the trainer's."""
        directory, bulk = system.directory, Bulk.of(system, encrypted=setup.encrypted)
        self._setup = setup
        self._policies = HostedPolicies(setup)
        self._experience = reader_of(setup, system)
        self._transport = StateTransport(
            directory, find_devices(setup.devices), setup.weights.only_path, bulk
        )
        self._weights: dict[PolicyName, _Weights] = {}

    async def start(self) -> None:
        await self._transport.__aenter__()
        with first_error():
            async with asyncio.TaskGroup() as group:
                for policy in self._setup.policies:
                    await self._policies.compute(
                        f"the start of {policy}", partial(self._policies.build, policy)
                    )
                    group.create_task(self._reserve(policy))

    async def _reserve(self, policy: PolicyName) -> None:
        """Makes the host memory of the policy's two newest versions, so that no Set waits for its pages. Raises
        ArenaSpace."""
        if "shm" in self._transport.offered:
            size_bytes = await self._policies.compute(
                f"the weights of {policy}", lambda: payload_bytes(self._policies[policy].weights())
            )
            await self._transport.reserve(size_bytes)

    async def sft(self, policy: PolicyName, first_batch: int, count: int) -> float:
        return await self._policies.sft(policy, first_batch, count)

    async def end_sft(self, policy: PolicyName) -> None:
        self._weights[policy] = await self._policies.end_sft(policy, _weights_of)

    async def accumulate(
        self, policy: PolicyName, leased: LeasedBatch, place: Place | None = None
    ) -> MicroBatchTrained:
        samples = await self._experience.samples(leased)
        if place is not None:
            await place.wait_turn()
        return await self._policies.accumulate(policy, samples)

    async def optimizer_step(self, policy: PolicyName, step: Step) -> tuple[StepStats, Version]:
        stats, weights = await self._policies.optimizer_step(policy, step, _weights_of)
        self._weights[policy] = weights
        return stats, Version(weights.version)

    async def publish(self, policy: PolicyName) -> Published:
        weights = self._weights.pop(policy)
        handle = await self._transport.set(
            policy, weights.tensors, version=weights.version, timeout_s=TRANSFER_TIMEOUT_S
        )
        return Published(policy, Version(weights.version), handle)

    async def save(self, policy: PolicyName, folder: Path) -> None:
        await self._policies.save(policy, folder)

    @property
    def transport(self) -> StateTransport:
        return self._transport

    def rows_committed(self, policy: PolicyName) -> None:
        self._experience.forget_consumed()

    async def close(self) -> None:
        self._policies.close()
        self._experience.close()
        await self._transport.close()

    def waits(self) -> Sequence[Wait]:
        return self._policies.waits()

    def progress(self) -> int:
        return self._policies.progress()

    def statistics(self) -> Mapping[str, float]:
        """Numbers of the transport, as ``transport_...``, and of the reader of samples."""
        return self._transport.statistics().numbers() | self._experience.statistics()


def _weights_of(backend: PolicyBackend) -> _Weights:
    return _Weights(backend.version, backend.weights())
