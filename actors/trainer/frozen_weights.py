"""Weights of frozen policies, published for their instances."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from ...core.durable.files import FILE_MODE, draft_of, make_private_folder, sync
from ...core.system import ActorSystem
from ...transport.handle import PathName
from ...transport.state import StateTransport
from ..errors import CheckpointIncomplete
from ..messages import Published
from ..names import PolicyName, Version
from .backends.weights_source import WeightsSource
from .pool.lender import TRANSFER_TIMEOUT_S
from .pool.slot import factory_of
from .trainer_setup import PolicySetup, TrainerSetup


class FrozenWeights:
    """``system``: the trainer's. ``transport``: of its process, whose only memory of a frozen policy is the published
    copy."""

    def __init__(self, setup: TrainerSetup, system: ActorSystem, transport: StateTransport) -> None:
        self._of_endpoints = {
            policy for policy, frozen_setup in setup.frozen.items() if frozen_setup.is_of_an_endpoint
        }
        frozen = {
            policy: _on_cpu(frozen_setup)
            for policy, frozen_setup in setup.frozen.items()
            if policy not in self._of_endpoints
        }
        self._setup = replace(setup, policies=frozen, resume_from=None, pool=None)
        self._system, self._transport = system, transport
        self._is_simulated = all(policy.model is None for policy in setup.policies.values())

    async def publish(self, policy: PolicyName) -> Published:
        """The weights that the policy's setup names, as version 0; a placeholder for a policy of an endpoint. Raises
        CheckpointIncomplete, CheckpointMismatch."""
        if policy in self._of_endpoints:
            return await self._set(policy, Version(0), {"state": np.zeros(2, np.int64)})
        factory, setup = factory_of(self._setup, None), self._setup.policies[policy]
        try:
            source = await factory.compute(lambda: factory.frozen_weights(policy, setup))
            return await self._fill(policy, Version(0), source)
        finally:
            factory.close()

    async def keep(self, published: Published, file: Path) -> None:
        """Writes published weights to ``file``, whole or not at all. Raises the errors of ``StateTransport.get``."""
        if self._is_simulated:
            state = {"state": np.zeros(2, np.int64)}
            await self._transport.get(published.handle, into=state, timeout_s=TRANSFER_TIMEOUT_S)
            _write(file, state)
            return
        async with self._transport.mapped(
            published.handle, checked=True, timeout_s=TRANSFER_TIMEOUT_S
        ) as tensors:
            await self._system.run_blocking(_write, file, tensors)

    async def publish_file(self, policy: PolicyName, version: Version, file: Path) -> Published:
        """Weights that ``keep`` has written, as ``version`` of ``policy``. Raises CheckpointIncomplete."""
        if self._is_simulated:
            state = _simulated_state(file)
            return await self._set(policy, version, {"state": np.array([version, state[1]], np.int64)})
        return await self._fill(policy, version, await self._system.run_blocking(_source_of, file))

    async def _fill(self, policy: PolicyName, version: Version, source: WeightsSource) -> Published:
        """Sets weights that are nowhere whole before."""

        async def write(tensors: Mapping[str, Any]) -> None:
            await self._system.run_blocking(source.write, tensors)

        handle = await self._transport.fill(
            policy,
            source.outline,
            write,
            version=version,
            offer=self._offer(),
            timeout_s=TRANSFER_TIMEOUT_S,
        )
        return Published(policy, version, handle)

    async def _set(self, policy: PolicyName, version: Version, tensors: Mapping[str, Any]) -> Published:
        handle = await self._transport.set(
            policy, tensors, version=version, offer=self._offer(), timeout_s=TRANSFER_TIMEOUT_S
        )
        return Published(policy, version, handle)

    def _offer(self) -> list[PathName]:
        return [path for path in self._transport.offered if path != "cuda_ipc"]


def _on_cpu(setup: PolicySetup) -> PolicySetup:
    if setup.model is None:
        return setup
    return setup.model_copy(update={"model": setup.model.model_copy(update={"device": "cpu"})})


# PyTorch is imported by the processes alone that have real policies.


def _write(file: Path, tensors: Mapping[str, Any]) -> None:
    make_private_folder(file.parent)
    with draft_of(file) as draft:
        if all(isinstance(tensor, np.ndarray) for tensor in tensors.values()):
            from safetensors.numpy import save_file

            save_file(dict(tensors), draft)
        else:
            from .policy_files import write_tensors

            write_tensors(draft, tensors)
        draft.chmod(FILE_MODE)
        sync(draft)


def _simulated_state(file: Path) -> Any:
    from safetensors.numpy import load_file

    try:
        return load_file(file)["state"]
    except (OSError, SafetensorError) as error:
        raise CheckpointIncomplete(file, f"weights of a past version: {error}") from error


def _source_of(file: Path) -> WeightsSource:
    from .policy_files import outline_of_file, read_tensors_into

    return WeightsSource(outline_of_file(file), partial(read_tensors_into, file))
