"""Simulated policies of a trainer: their computing time is slept on the event loop's clock."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from ....transport.handle import TensorSpec
from ...chat.byte_codec import END_OF_SEQUENCE, ByteCodec
from ...names import PolicyName
from ..trainer_setup import PolicySetup
from .backend_config import SimulatedTrainerConfig
from .backend_factory import BackendFactory
from .policy_backend import PolicyBackend
from .simulated_policy import SimulatedPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .torch_policy.gang_rank import GangRank

T = TypeVar("T")


class SimulatedFactory(BackendFactory):
    """``seed``: of the run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._computing = asyncio.Lock()
        self._owed_s = 0.0
        self._free_s = 0.0  # the end of all computations so far, by the loop's clock

    def build(
        self, policy: PolicyName, setup: PolicySetup, gang: "GangRank | None" = None
    ) -> SimulatedPolicy:
        assert isinstance(setup.trainer, SimulatedTrainerConfig)
        return SimulatedPolicy(
            policy, setup.trainer, seed=self._seed, sleep=self._owe, max_staleness=setup.max_staleness
        )

    def frozen_weights(self, policy: PolicyName, setup: PolicySetup) -> Mapping[str, Any]:
        backend = self.build(policy, setup)
        if setup.init_from is not None:
            backend.start_from(setup.init_from)
        return backend.weights()

    def memory(self, setup: PolicySetup, tensors: Iterable[TensorSpec]) -> dict[str, Any]:
        return {spec.name: np.zeros(spec.shape, spec.dtype) for spec in tensors}

    def host(
        self,
        policy: PolicyName,
        setup: PolicySetup,
        gang: "GangRank | None" = None,
        memory: dict[str, Any] | None = None,
    ) -> SimulatedPolicy:
        backend = self.build(policy, setup, gang)
        for name, tensor in {**backend.base_state(), **backend.gradients()}.items():
            if memory and name in memory:
                tensor[:] = memory[name]
        return backend

    def release(self, backend: PolicyBackend) -> None:
        """There is no memory to keep."""

    def tokenizer(self, setup: PolicySetup) -> "PreTrainedTokenizerBase":
        return cast("PreTrainedTokenizerBase", _Bytes())

    def codec(self, tokenizer: "PreTrainedTokenizerBase") -> ByteCodec:
        return ByteCodec("simulated")

    async def compute(self, function: Callable[[], T]) -> T:
        """The next begins the moment the one before it ends, however late this loop wakes: a GPU's queue does so."""
        time = asyncio.get_running_loop().time
        asked_s = time()
        async with self._computing:
            self._owed_s = 0.0
            result = function()
            self._free_s = max(asked_s, self._free_s) + self._owed_s
            await asyncio.sleep(self._free_s - time())
            return result

    def close(self) -> None:
        """Nothing is left: computations are those of the actor's calls, which end with it."""

    def _owe(self, seconds: float) -> None:
        self._owed_s += seconds


class _Bytes:
    """A tokenizer, as far as the trainer needs one beside its codec."""

    eos_token_id = END_OF_SEQUENCE
