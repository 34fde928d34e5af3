"""Weights of frozen policies, published for their instances."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...transport.state import StateTransport
from ..messages import Published
from ..names import PolicyName, Version
from .host_memory import TRANSFER_TIMEOUT_S
from .hosted_policies import backends_of
from .trainer_setup import PolicySetup, TrainerSetup


class FrozenWeights:
    """``transport``: of the trainer's process, whose only memory of a frozen policy is the copy that is published."""

    def __init__(self, setup: TrainerSetup, transport: StateTransport) -> None:
        frozen = {policy: _on_cpu(of_policy) for policy, of_policy in setup.frozen.items()}
        self._setup = replace(setup, policies=frozen, resume_from=None, pool=None)
        self._transport = transport

    async def publish(self, policy: PolicyName) -> Published:
        """The weights that the policy's setup names, as version 0. Raises CheckpointIncomplete, CheckpointMismatch."""
        backends, setup = backends_of(self._setup), self._setup.policies[policy]
        try:
            weights = await backends.compute(lambda: backends.frozen_weights(policy, setup))
            return await self._set(policy, Version(0), weights)
        finally:
            backends.close()

    async def _set(self, policy: PolicyName, version: Version, tensors: Mapping[str, Any]) -> Published:
        offer = [path for path in self._transport.offered if path != "cuda_ipc"]
        handle = await self._transport.set(
            policy, tensors, version=version, offer=offer, timeout_s=TRANSFER_TIMEOUT_S
        )
        return Published(policy, version, handle)


def _on_cpu(setup: PolicySetup) -> PolicySetup:
    if setup.model is None:
        return setup
    return setup.model_copy(update={"model": setup.model.model_copy(update={"device": "cpu"})})
