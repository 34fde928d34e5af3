"""Times of an engine: of a decode step, of prompts, and the room for keys and values. Pure.

An engine takes its steps one after the other. A step computes a token of each running sequence, and with chunked
prefill a part of the prompts that have just come:

    step       overhead
               + products with weights      the longer of reading all weights and computing all tokens of the step
               + keys and values            reading those of all tokens in the context of each sequence
               + sums over devices          of the tokens of the step, with tensor parallelism

``decode_s`` is such a step without prompts, and ``prefill_s`` the time that prompts add to the steps that compute them.
A roofline gives the coefficients (``launch/simulate/roofline.py``); measured tables fit behind the same interface.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated

from ..config_base import Config, Count, NonNegative, Positive, Unit


class EngineTimes(ABC):
    """Seconds of an engine's work. They grow with each argument."""

    @abstractmethod
    def decode_s(self, batch: int, context: float) -> float:
        """A decode step of ``batch`` sequences, at least one, with ``context`` tokens in all of them together."""

    @abstractmethod
    def prefill_s(self, prompts: Sequence[float], batch: int) -> float:
        """The time that prompts of these lengths add to the steps of ``batch`` running sequences."""

    @property
    def prompt_gives_token(self) -> bool:
        """The forward that computes a prompt gives the first token of its answer. Else the step of the running
        sequences gives it, which the prompt makes longer."""
        return False

    @property
    @abstractmethod
    def room_tokens(self) -> int | None:
        """Tokens whose keys and values fit into the memory together; None: there is no limit."""


class RooflineTimes(Config, EngineTimes):
    """Coefficients of an engine on its devices, in seconds."""

    step_s: Annotated[NonNegative, Unit("s")]
    """A step beside the computations of the device."""
    weights_s: Annotated[Positive, Unit("s")]
    """Reading all weights."""
    token_s: Annotated[Positive, Unit("s")]
    """Products of a token with all weights."""
    context_token_s: Annotated[NonNegative, Unit("s")]
    """Reading keys and values of a token in the context."""
    pair_s: Annotated[NonNegative, Unit("s")]
    """Attention of a token of a prompt to one before it."""
    exchange_token_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Sums over devices, for each token."""
    prompts_apart: bool = False
    """Prompts have forwards of their own, in which no token of a running sequence is computed."""
    chunk_s: Annotated[NonNegative, Unit("s")] = 0.0
    """A chunk of prompts beside its products, if it has a forward of its own."""
    chunk_tokens: Annotated[Count, Unit("tokens")] = 8192
    """Most tokens of prompts in a step."""
    kv_tokens: Annotated[Count, Unit("tokens")]
    """Tokens whose keys and values fit into the memory."""

    def decode_s(self, batch: int, context: float) -> float:
        return (
            self.step_s
            + self._products_s(batch)
            + context * self.context_token_s
            + batch * self.exchange_token_s
        )

    def prefill_s(self, prompts: Sequence[float], batch: int) -> float:
        chunks, last = divmod(sum(prompts), self.chunk_tokens)
        if self.prompts_apart:
            added_s = sum(prompts) * (self.token_s + self.exchange_token_s)
            # Chunks are small, and little of the reading is hidden behind their products.
            added_s += (chunks + (last > 0)) * (self.chunk_s + self.weights_s)
        else:
            added_s = chunks * self._added_s(self.chunk_tokens, batch) + self._added_s(last, batch)
        return added_s + self.pair_s * sum(prompt * prompt for prompt in prompts) / 2

    @property
    def prompt_gives_token(self) -> bool:
        return self.prompts_apart

    @property
    def room_tokens(self) -> int:
        return self.kv_tokens

    def _products_s(self, tokens: float) -> float:
        return max(self.weights_s, tokens * self.token_s)

    def _added_s(self, tokens: float, batch: int) -> float:
        """A step reads the weights once, for its prompts and its running sequences."""
        added_s = self._products_s(batch + tokens) - self._products_s(batch)
        return added_s + tokens * self.exchange_token_s


class SteadyTimes(EngineTimes):
    """A decode step that further sequences make longer, but not their context; prompts take steps of their sequence,
    and the memory has no limit: the settings of a simulated engine that is on no device."""

    def __init__(self, token_s: float, crowding: float) -> None:
        self._token_s = token_s
        self._crowding = crowding

    def decode_s(self, batch: int, context: float) -> float:
        return self._token_s * (1.0 + self._crowding * (batch - 1))

    def prefill_s(self, prompts: Sequence[float], batch: int) -> float:
        return 0.0

    @property
    def room_tokens(self) -> None:
        return None
