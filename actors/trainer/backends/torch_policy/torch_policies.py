"""Policies that PyTorch trains, in one thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from ....model_sources import load_tokenizer
from ....names import PolicyName
from ...trainer_setup import PolicySetup
from ..policy_backend import PolicyBackend
from ..policy_backends import PolicyBackends
from .gang_rank import ALONE, GangRank, joined
from .torch_policy import TorchPolicy
from .trained_models import TrainedModels

T = TypeVar("T")

# A rank that was killed is noticed at once; this is for one that has died before it met the others.
_GANG_TIMEOUT_S: Final = 120.0


class TorchPolicies(PolicyBackends):
    """``seed`` and ``total_steps``: of the run. ``most_kept``: released policies whose memory is kept, the latest."""

    def __init__(self, seed: int, total_steps: int, most_kept: int = 1) -> None:
        self._seed, self._total_steps, self._most_kept = seed, total_steps, most_kept
        self._released: list[TrainedModels] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    def build(self, policy: PolicyName, setup: PolicySetup, gang: GangRank | None = None) -> TorchPolicy:
        return TorchPolicy(policy, setup, seed=self._seed, total_steps=self._total_steps, gang=gang or ALONE)

    def host(self, policy: PolicyName, setup: PolicySetup, gang: GangRank | None = None) -> TorchPolicy:
        gang = gang or ALONE
        models = next((each for each in reversed(self._released) if each.fit(setup, gang)), None)
        if models is not None:
            self._released.remove(models)
            models.take_settings(setup)
        models = models or TrainedModels(setup, None, gang)
        return TorchPolicy(policy, setup, seed=self._seed, total_steps=self._total_steps, models=models)

    def release(self, backend: PolicyBackend) -> None:
        assert isinstance(backend, TorchPolicy)
        if backend.models.gang is ALONE:  # the process group of any other ends
            self._released.append(backend.models)
        del self._released[: -self._most_kept or None]

    def joined(
        self, setup: PolicySetup, rank: int, size: int, meeting: Path
    ) -> AbstractContextManager[GangRank]:
        return joined(rank, size, meeting, torch.device(setup.real_model.device), _GANG_TIMEOUT_S)

    def tokenizer(self, setup: PolicySetup) -> PreTrainedTokenizerBase:
        return load_tokenizer(setup.real_model)

    async def compute(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def close(self) -> None:
        # Not waiting: a computation under way can't be interrupted, and the loop has other actors to serve. The
        # process ends after it.
        self._thread.shutdown(wait=False, cancel_futures=True)
