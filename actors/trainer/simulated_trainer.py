"""The trainer actor with simulated policies. What they take is slept on the event loop's clock, not computed.

Everything else, leases, commits, publishing and saving, is the trainer's own.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from transformers import PreTrainedTokenizerBase

from .backends.policy_backend import PolicyBackend
from .backends.simulated_policy import SimulatedPolicy, SimulatedTrainerConfig
from .trainer import Trainer
from .trainer_config import PolicyConfig

T = TypeVar("T")


class SimulatedTrainer(Trainer):
    """Fulfils ``TrainerApi``, for models ``{"model_type": "simulated", "trainer": {...}}``, where ``trainer`` is a
    ``SimulatedTrainerConfig``. One computation at a time, in the order in which they were asked for."""

    async def on_start(self) -> None:
        self._computing = asyncio.Lock()
        self._owed_s = 0.0
        self._free_s = 0.0  # by the loop's clock, when all that was asked for so far is done
        await super().on_start()

    def _build(self, agent: str, config: PolicyConfig) -> PolicyBackend:
        settings = SimulatedTrainerConfig.model_validate((config.model.config or {}).get("trainer", {}))
        policy = SimulatedPolicy(
            agent,
            settings,
            seed=self._recipe_config.seed,
            sleep=self._owe,
            max_staleness=config.max_staleness,
        )
        self._tokenizers[agent] = cast(PreTrainedTokenizerBase, _Bytes())
        if self._resume_from is not None:
            policy.load(self._resume_from / agent)
        return policy

    def _owe(self, seconds: float) -> None:
        self._owed_s += seconds

    async def _compute(self, function: Callable[[], T]) -> T:
        """What waits begins the moment the one before it ends, however late this loop wakes: a GPU's queue does so."""
        time = asyncio.get_running_loop().time
        asked_s = time()
        async with self._computing:
            self._owed_s = 0.0
            result = function()
            self._free_s = max(asked_s, self._free_s) + self._owed_s
            await asyncio.sleep(self._free_s - time())
            return result


@dataclass(frozen=True, slots=True)
class _Encoded:
    input_ids: list[int]


class _Bytes:
    """Text as its bytes of UTF-8, as far as the trainer asks for a tokenizer."""

    eos_token_id = 0

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> _Encoded:
        return _Encoded(list(text.encode()))
