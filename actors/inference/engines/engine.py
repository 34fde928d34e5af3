"""The interface of inference engines: requests in, finished generations out, one step at a time.

An engine is a synchronous, single-threaded compute object. It has no event loop, thread or socket of its own: an
instance calls it from one worker thread, and every call but ``step`` returns at once.
"""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from ...errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor


FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate. Raises InvalidRequest if no engine could serve it.

    ``seed`` (any int) alone decides the random numbers: the same request gives the same tokens in any batch, up to the
    rounding of the logits. ``temperature`` 0 is greedy decoding.

    ``resumed_tokens``: the last tokens of the prompt that an earlier request with this seed generated. The random
    numbers continue behind theirs, so that under the same weights both parts equal one generation.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    seed: int
    temperature: float
    max_new_tokens: int
    resumed_tokens: int = 0

    def __post_init__(self) -> None:
        if (problem := self._problem()) is not None:
            raise InvalidRequest(self.request_id, problem)

    def _problem(self) -> str | None:
        prompt_tokens = len(self.prompt_tokens)
        if not prompt_tokens:
            return "the prompt is empty"
        if self.max_new_tokens < 1:
            return f"max_new_tokens is {self.max_new_tokens}, needs at least 1"
        if not 0 <= self.temperature < float("inf"):
            return f"temperature is {self.temperature}, needs a finite number >= 0"
        if not 0 <= self.resumed_tokens < prompt_tokens:
            return (
                f"resumed_tokens is {self.resumed_tokens}, needs 0 to {prompt_tokens - 1} of {prompt_tokens}"
            )
        return None


@dataclass(frozen=True, slots=True)
class EngineResult:
    """A generation that has ended.

    ``tokens`` ends with the end-of-sequence token if ``finish_reason`` is ``stop``; it may be empty if
    ``finish_reason`` is ``interrupted``. ``logprobs[i]`` (nats) belongs to ``tokens[i]``, under the distribution that
    the token was sampled from, after temperature; greedy tokens have their log-probability at temperature 1.
    """

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Totals since the engine was made, means over that time, and the present load."""

    steps: int
    prompt_tokens: int
    """Prompt tokens of all requests that left the queue."""
    generated_tokens: int
    interrupted: int
    """Requests that were aborted before their end."""
    prefill_s: float
    decode_s: float
    batch_occupancy: float
    """Mean share of ``max_batch`` in use while decoding, 0 to 1."""
    running: int
    """Requests in the batch now."""
    waiting: int
    """Requests in the queue now."""
    cache_tokens: int
    """Tokens that the allocated cache of keys and values has room for now."""

    def numbers(self) -> dict[str, float]:
        """The fields by name, as ``engine_<field>``."""
        return {f"engine_{name}": value for name, value in asdict(self).items()}


class Engine(ABC):
    """The contract of every engine. Only ``statistics`` may be called while another call runs."""

    @abstractmethod
    def add(self, request: EngineRequest) -> None:
        """Queues a request; a later ``step`` returns its result.

        Raises PromptTooLong if the prompt and ``max_new_tokens`` exceed the context, and InvalidRequest if the id is in
        use or a token is outside the vocabulary.
        """

    @abstractmethod
    def step(self) -> list[EngineResult]:
        """Admits waiting requests, advances every running one and returns those that finished, in any order.

        Without a request it returns an empty list at once. Raises NonFiniteLogits if the model's output is infinite or
        not a number; the requests stay, to be aborted.
        """

    @abstractmethod
    def abort(self, request_id: str) -> EngineResult | None:
        """Ends a request now and returns the tokens generated so far, as ``interrupted``; ``step`` returns no result of
        it. Returns None for an unknown or finished request."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Requests that are waiting or running, and results that no ``step`` has returned yet."""

    @abstractmethod
    def weights(self) -> "dict[str, Tensor]":
        """The engine's own tensors by state-dict name, to be overwritten in place, then followed by ``weights_loaded``.

        Tied weights appear once, under the first of their names.
        """

    @abstractmethod
    def weights_loaded(self) -> None:
        """Discards everything derived from the former weights (cached keys and values, packed copies).

        Raises RequestsInFlight if a request is pending: it would continue under other weights.
        """

    @abstractmethod
    def statistics(self) -> EngineStatistics:
        """The counters; from any thread, at any time."""
