"""Simulated policies of a trainer: their computing time is slept on the event loop's clock.

Ranks that meet in a process group wait for each other in a thread, beside the loop.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from ....core.base.collector import importing
from ....core.base.threads import in_thread
from ....transport.handle import TensorSpec
from ...chat.byte_codec import END_OF_SEQUENCE, ByteCodec
from ...messages import NO_GANG, GangPlace
from ...names import PolicyName
from ..trainer_setup import PolicySetup
from .backend_config import SimulatedTrainerConfig
from .backend_factory import BackendFactory
from .policy_backend import PolicyBackend
from .simulated_policy import SimulatedPolicy
from .weights_source import WeightsSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .torch_policy.gang_meeting import Meeting, Membership
    from .torch_policy.gang_rank import GangRank

T = TypeVar("T")


class SimulatedFactory(BackendFactory):
    """``seed``: of the run. ``has_groups``: gangs have process groups."""

    def __init__(self, seed: int, *, has_groups: bool = False) -> None:
        self._seed = seed
        self._has_groups = has_groups
        if has_groups:
            with importing():
                from . import simulated_gang  # noqa: F401  # PyTorch takes seconds: not while others wait
        self._computing = asyncio.Lock()
        self._owed_s = 0.0
        self._free_s = 0.0  # the end of all computations so far, by the loop's clock

    def build(
        self,
        policy: PolicyName,
        setup: PolicySetup,
        gang: "GangRank | None" = None,
        *,
        place: GangPlace = NO_GANG,
    ) -> SimulatedPolicy:
        assert isinstance(setup.trainer, SimulatedTrainerConfig)
        return SimulatedPolicy(
            policy,
            setup.trainer,
            seed=self._seed,
            sleep=self._owe,
            max_staleness=setup.max_staleness,
            meet=None if gang is None else _meeting_of(gang, policy),
            place=place,
        )

    def frozen_weights(self, policy: PolicyName, setup: PolicySetup) -> WeightsSource:
        backend = self.build(policy, setup)
        if setup.init_from is not None:
            backend.start_from(setup.init_from)
        return WeightsSource(backend.weights_outline(), backend.gather_weights)

    def memory(self, policy: PolicyName, setup: PolicySetup, tensors: Iterable[TensorSpec]) -> dict[str, Any]:
        return {spec.name: np.zeros(spec.shape, spec.dtype) for spec in tensors}

    def host(
        self,
        policy: PolicyName,
        setup: PolicySetup,
        gang: "GangRank | None" = None,
        memory: dict[str, Any] | None = None,
        *,
        place: GangPlace = NO_GANG,
    ) -> SimulatedPolicy:
        backend = self.build(policy, setup, gang, place=place)
        for name, tensor in {**backend.base_state(), **backend.gradients()}.items():
            if memory and name in memory:
                tensor[:] = memory[name]
        return backend

    def release(self, backend: PolicyBackend) -> None:
        """See ``BackendFactory.release``: there is no memory to keep."""

    def open_meeting(self, host: str) -> "Meeting | None":
        if not self._has_groups:
            return None
        from .simulated_gang import open_meeting

        return open_meeting(host)

    def membership(self, setup: PolicySetup, place: GangPlace) -> "Membership | None":
        if not self._has_groups:
            return None
        from .simulated_gang import membership_of

        return membership_of(place)

    def tokenizer(self, setup: PolicySetup) -> "PreTrainedTokenizerBase":
        return cast("PreTrainedTokenizerBase", _Bytes())

    def codec(self, setup: PolicySetup, tokenizer: "PreTrainedTokenizerBase") -> ByteCodec:
        return ByteCodec("simulated")

    async def compute(self, function: Callable[[], T]) -> T:
        """The next begins the moment the one before it ends, however late this loop wakes: a GPU's queue does so."""
        time = asyncio.get_running_loop().time
        asked_s = time()
        async with self._computing:
            self._owed_s = 0.0
            result = await in_thread(function) if self._has_groups else function()
            self._free_s = max(asked_s, self._free_s) + self._owed_s
            await asyncio.sleep(self._free_s - time())
            return result

    def close(self) -> None:
        """Nothing is left: computations are those of the actor's calls, which end with it."""

    def _owe(self, seconds: float) -> None:
        self._owed_s += seconds


def _meeting_of(gang: "GangRank", policy: PolicyName) -> Callable[[int], None]:
    from .simulated_gang import meet

    return partial(meet, gang, policy)


class _Bytes:
    """A tokenizer, as far as the trainer needs one beside its codec."""

    eos_token_id = END_OF_SEQUENCE
