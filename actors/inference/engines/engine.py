"""The inference engine as an instance sees it: requests in, finished generations out, one step at a time.

An engine is a synchronous, single-threaded compute object. It owns no loop, thread or socket: the Instance
actor calls it from one worker thread, and every call but ``step`` returns at once.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor


FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate.

    ``seed`` (any int) alone decides the draws: the same request gives the same tokens whatever else the
    engine is doing, up to the rounding of the logits. ``temperature`` 0 is greedy decoding. Raises
    ``InvalidRequest`` when it could not be served by any engine.

    ``drawn``: that many tokens at the end of the prompt were drawn with this seed before; the draws go on where those
    ended, so that the same weights would have given the same tokens in one go.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    seed: int
    temperature: float
    max_new_tokens: int
    resumed_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.prompt_tokens:
            raise InvalidRequest(self.request_id, "the prompt is empty")
        if self.max_new_tokens < 1:
            raise InvalidRequest(
                self.request_id, f"max_new_tokens is {self.max_new_tokens}, needs at least 1"
            )
        if not 0 <= self.temperature < float("inf"):
            raise InvalidRequest(
                self.request_id, f"temperature is {self.temperature}, needs a finite number >= 0"
            )
        if not 0 <= self.resumed_tokens < len(self.prompt_tokens):
            raise InvalidRequest(
                self.request_id,
                f"resumed_tokens is {self.resumed_tokens}, needs 0 to {len(self.prompt_tokens) - 1}: "
                "at least one prompt token was not generated",
            )


@dataclass(frozen=True, slots=True)
class EngineResult:
    """A generation that has ended.

    ``tokens`` ends with the end-of-sequence token when ``finish_reason`` is ``stop``, and may be empty when it is
    ``interrupted``. ``logprobs[i]`` (nats)
    belongs to ``tokens[i]`` and is taken from the distribution it was drawn from, after temperature; greedy
    tokens get their log-probability at temperature 1.
    """

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Totals since the engine was made (``steps`` ... ``decode_s``), and how many requests it holds now.

    ``prefill_s`` and ``decode_s`` are the seconds spent computing prompts and generating.
    """

    steps: int
    prompt_tokens: int
    generated_tokens: int
    prefill_s: float
    decode_s: float
    active: int
    waiting: int


class Engine(ABC):
    """What every inference engine does. Nothing here may be called from two threads at once."""

    @abstractmethod
    def add(self, request: EngineRequest) -> None:
        """Queue a request; its result comes out of a later ``step``.

        Raises ``PromptTooLong`` when the prompt and ``max_new_tokens`` can't fit the context, and
        ``InvalidRequest`` when the id is in use or a token is outside the vocabulary.
        """

    @abstractmethod
    def step(self) -> list[EngineResult]:
        """Advance every active request, admitting waiting ones; returns those that finished, in no order.

        With nothing pending it returns an empty list at once. Raises ``NonFiniteLogits`` when the model's
        output is no distribution; the requests stay, to be aborted.
        """

    @abstractmethod
    def abort(self, request_id: str) -> EngineResult | None:
        """End a request now; ``step`` returns no result of it. What it has generated so far, ``interrupted``; None
        when the engine doesn't have it (any more)."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Requests waiting or active: those a result is owed for."""

    @abstractmethod
    def weights(self) -> "dict[str, Tensor]":
        """The engine's own tensors by state-dict name, to be overwritten in place.

        Tied weights appear once, under the first of their names. Call ``weights_loaded`` after.
        """

    @abstractmethod
    def weights_loaded(self) -> None:
        """Drop all that was derived from the former weights (cached keys and values, packed copies).

        Raises ``RequestsInFlight`` when requests are pending: they would continue under other weights.
        """

    @abstractmethod
    def statistics(self) -> EngineStatistics:
        """Counters for telemetry."""
