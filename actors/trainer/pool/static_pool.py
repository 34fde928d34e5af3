"""A pool of one slot, in a thread of the trainer's own process: all policies are on it for ever."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from ....core.base.task_groups import first_error
from ....core.system import ActorSystem
from ....transport.device_memory.devices import DeviceEvent
from ....transport.state import payload_bytes
from ...messages import LikelyTokens, Published
from ...names import PolicyName, Version
from ...spans import record_time
from ..trainer_setup import TrainerSetup
from .lender import TRANSFER_TIMEOUT_S
from .slot import Background, Slot
from .training_pool import TrainingPool


class StaticPool(Slot, TrainingPool):
    """See ``TrainingPool``. The event loop stays free during a computation.

    It is the slot itself, not a ``SharedPool`` of one: a policy that is never suspended needs no copy of its moments in
    the host's memory after each step, and no allocator, lives and replays.
    """

    def __init__(self, setup: TrainerSetup, system: ActorSystem, background: Background) -> None:
        """``system`` and ``background``: the trainer's."""
        super().__init__(setup)
        self._system, self._background = system, background
        self._weights: dict[PolicyName, tuple[Version, Mapping[str, Any], DeviceEvent | None]] = {}
        """Weights to publish, and the point of the computations from which on they are complete. They may alias the
        live ones."""
        self._probes: dict[PolicyName, tuple[LikelyTokens, ...]] = {}
        """Probes of these weights."""

    async def start(self) -> None:
        await self.open(self._system, self._background, self._setup.weights.only_path)
        with first_error():
            async with asyncio.TaskGroup() as group:
                for policy in self._setup.policies:
                    await self.compute(
                        f"the start of {policy}",
                        partial(self.build, policy),
                        self._record_as("build", policy),
                    )
                    group.create_task(self._reserve(policy))

    async def _reserve(self, policy: PolicyName) -> None:
        """Makes the host memory of the policy's two newest versions, so that no Set waits for its pages. Raises
        ArenaSpace."""
        if "shm" in self.transport.offered:
            await self.transport.reserve(payload_bytes(self[policy].weights_outline()))

    def _note_weights(self, policy: PolicyName) -> None:
        weights = self[policy].weights()
        # Recorded here, in the computation: a publish waits for its own step, not for what another policy begins then.
        self._weights[policy] = Version(self[policy].version), weights, self.transport.record()
        self._probes[policy] = self[policy].probe()

    async def publish(self, policy: PolicyName) -> Published:
        version, tensors, complete = self._weights.pop(policy)
        with record_time(self._spans, self._lane, "publish", policy=policy, version=version):
            handle = await self.transport.set(
                policy, tensors, version=version, after=complete, timeout_s=TRANSFER_TIMEOUT_S
            )
        return Published(policy, version, handle, self._probes[policy])

    def rows_committed(self, policy: PolicyName) -> None:
        self.forget_consumed()
