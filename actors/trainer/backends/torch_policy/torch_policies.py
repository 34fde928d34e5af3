"""Policies that PyTorch trains, in one thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from ....model_sources import load_tokenizer
from ....names import PolicyName
from ...trainer_setup import PolicySetup
from ..policy_backends import PolicyBackends
from .torch_policy import TorchPolicy

T = TypeVar("T")


class TorchPolicies(PolicyBackends):
    """``seed`` and ``total_steps``: of the run."""

    def __init__(self, seed: int, total_steps: int) -> None:
        self._seed, self._total_steps = seed, total_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    def build(self, policy: PolicyName, setup: PolicySetup) -> TorchPolicy:
        return TorchPolicy(policy, setup, seed=self._seed, total_steps=self._total_steps)

    def tokenizer(self, setup: PolicySetup) -> PreTrainedTokenizerBase:
        return load_tokenizer(setup.real_model)

    async def compute(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def close(self) -> None:
        # Not waiting: a computation under way can't be interrupted, and the loop has other actors to serve. The
        # process ends after it.
        self._thread.shutdown(wait=False, cancel_futures=True)
