"""The trainer actor with simulated policies: their computing time is slept on the event loop's clock.

Everything else, leases, commits, publishing and saving, is the trainer's own.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from ..names import PolicyName
from .backends.policy_backend import PolicyBackend
from .backends.simulated_policy import SimulatedPolicy, SimulatedTrainerConfig
from .trainer import Trainer
from .trainer_setup import PolicySetup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class SimulatedTrainer(Trainer):
    """A ``Trainer`` for models ``{"model_type": "simulated", "trainer": {...}}``; ``trainer`` is a
    ``SimulatedTrainerConfig``. One computation at a time, in the order of the calls."""

    async def on_start(self) -> None:
        self._computing = asyncio.Lock()
        self._owed_s = 0.0
        self._free_s = 0.0  # the end of all computations so far, by the loop's clock
        await super().on_start()

    def _backend(self, policy: PolicyName, setup: PolicySetup) -> PolicyBackend:
        settings = SimulatedTrainerConfig.model_validate((setup.model.config or {}).get("trainer", {}))
        return SimulatedPolicy(
            policy,
            settings,
            seed=self._setup.recipe.seed,
            sleep=self._owe,
            max_staleness=setup.max_staleness,
        )

    def _tokenizer(self, setup: PolicySetup) -> "PreTrainedTokenizerBase":
        return cast("PreTrainedTokenizerBase", _Bytes())

    def _owe(self, seconds: float) -> None:
        self._owed_s += seconds

    async def _compute(self, function: Callable[[], T]) -> T:
        """The next begins the moment the one before it ends, however late this loop wakes: a GPU's queue does so."""
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
    """A tokenizer, as far as the trainer needs one: text as its bytes of UTF-8."""

    eos_token_id = 0

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> _Encoded:
        return _Encoded(list(text.encode()))
