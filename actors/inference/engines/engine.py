"""The interface of inference engines."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Literal, NamedTuple

from ....transport.handle import StateHandle
from ....transport.state import StateTransport
from ...errors import InvalidRequest
from ...expert_routes import Routes
from ...messages import Chat, Truncation

TRANSFER_TIMEOUT_S: Final = 3600.0
"""Long enough for the largest models over the slowest path: catches a transfer that hangs."""

FinishReason = Literal["stop", "length", "interrupted"]
OnTokens = Callable[[tuple[int, ...]], object]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """``begin``, JSON of ``schema`` (JSON Schema, as text), and ``end``."""

    schema: str
    begin: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate. Raises InvalidRequest if no engine could serve it.

    ``seed`` (any int) alone decides the random numbers: the same request gives the same tokens in any batch, up to the
    rounding of the logits. ``temperature`` 0 is greedy decoding, which no ``truncation`` changes.

    ``resumed_tokens``: the last tokens of the prompt that an earlier request with this seed generated. The random
    numbers continue behind theirs, so that under the same weights both parts equal one generation.

    ``adapter``: the name by which its weights were loaded. See ``Engine.load``.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    seed: int
    temperature: float
    max_new_tokens: int
    resumed_tokens: int = 0
    adapter: str = ""
    truncation: Truncation | None = None
    """None: every token may be drawn."""
    chat: Chat | None = None
    """The messages that the prompt is of, for an engine that takes text."""
    stop: tuple[str, ...] = ()
    """Strings that end the turn, for an engine that takes text. The caller of any other ends it by ``on_tokens``."""
    forms: tuple[AnswerForm, ...] = ()
    """The answer has one of them, and ends behind it; empty: it may be anything. For an engine that ``constrains``.
    Such a request can't be resumed: the form begins with the first token behind the prompt."""

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
        if self.truncation is not None and (problem := self.truncation.problem()) is not None:
            return problem
        if not 0 <= self.resumed_tokens < prompt_tokens:
            return (
                f"resumed_tokens is {self.resumed_tokens}, needs 0 to {prompt_tokens - 1} of {prompt_tokens}"
            )
        return None


class Phases(NamedTuple):
    """Seconds of a request in its engine, from its arrival on: ``queue_s`` until the engine began to compute its
    prompt, ``prefill_s`` from there to its first token, or to its end without one. The rest is decoding."""

    queue_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class EngineResult:
    """A generation that has ended.

    ``tokens`` ends with the end-of-sequence token if ``finish_reason`` is ``stop``; it may be empty if
    ``finish_reason`` is ``interrupted``. ``logprobs[i]`` (nats) belongs to ``tokens[i]``, under the distribution that
    the token was sampled from, after the forms of its request, temperature and truncation; greedy tokens have their
    log-probability at temperature 1.

    ``phases``: the parts of its time; None: the engine can't tell. ``routes``: the experts of all tokens of prompt and
    generation but the last, which no forward has computed, by an engine that records them; None otherwise.
    """

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    phases: Phases | None = field(default=None, compare=False)
    routes: Routes | None = field(default=None, compare=False)

    def first(self, count: int, finish_reason: FinishReason) -> "EngineResult":
        """The same with its first ``count`` tokens alone."""
        kept = None
        if self.routes is not None and count:
            kept = self.routes[: len(self.routes) - len(self.tokens) + count]
        return replace(
            self,
            tokens=self.tokens[:count],
            logprobs=self.logprobs[:count],
            finish_reason=finish_reason,
            routes=kept,
        )


class Pending(NamedTuple):
    """A request that an engine has not answered yet."""

    adapter: str
    result: asyncio.Future[EngineResult]


_TOTALS: Final = (
    "steps", "prompt_tokens", "generated_tokens", "interrupted", "prefill_s", "decode_s", "reused_tokens",
    "computed_tokens", "prefill_chunks", "decoded_tokens", "queue_s", "service_s",
)  # fmt: skip


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
    reused_tokens: int = 0
    """The part of ``prompt_tokens`` whose keys and values were known already; the others were computed."""
    computed_tokens: int = 0
    """Tokens in the forwards over prompts, with their padding: equal prompts of a forward are computed once."""
    prefill_chunks: int = 0
    """Forwards over prompts or parts of prompts."""
    decoded_tokens: int = 0
    """The part of ``generated_tokens`` that decode steps gave: all but the first ones of the sequences."""
    kept_tokens: int = 0
    """Tokens of earlier prompts and answers whose keys and values are kept now."""
    queue_s: float = 0.0
    """Seconds that requests have waited to be begun, a total."""
    service_s: float = 0.0
    """Seconds from the beginning of each request to its end, a total."""

    def after(self, former: "EngineStatistics") -> "EngineStatistics":
        """With the totals of ``former`` too, an engine that this one has replaced; means and load stay."""
        return replace(self, **{name: getattr(self, name) + getattr(former, name) for name in _TOTALS})

    def numbers(self) -> dict[str, float]:
        """The fields by name, as ``engine_<field>``."""
        return {f"engine_{name}": value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """``transfer_s``: seconds in which the bytes of the weights were copied, or found and compared with their digests
    by an engine that copies them itself. ``load_s``: seconds of the engine's own work with them (that copy, packed
    copies, caches to be emptied, checks)."""

    transfer_s: float
    load_s: float


class Engine(ABC):
    """The contract of every engine: requests in, finished generations out. All calls come from one event loop."""

    @abstractmethod
    async def generate(self, request: EngineRequest, on_tokens: OnTokens | None = None) -> EngineResult:
        """The finished or interrupted generation. Cancelling it aborts the request.

        ``on_tokens`` gets the tokens as they come, on the event loop: each call those that are new since the last one.
        The engine does not wait for it: one call may have the tokens of many steps, and the last tokens come only with
        the result, which has all. If it returns True, the request ends as soon as possible, as ``interrupted``. It must
        not raise.

        Raises PromptTooLong if the prompt and ``max_new_tokens`` exceed the context, InvalidRequest if the id is in use
        or a token is outside the vocabulary, NonFiniteLogits if the model's output for this request is infinite or not
        a number, and EngineFailed.
        """

    @abstractmethod
    async def interrupt(self, adapter: str | None = None) -> None:
        """Ends every request now, as ``interrupted``, with the tokens that it has. Returns once all have ended: those
        whose ``generate`` began before. ``adapter``: ends the requests of this one alone. Raises EngineFailed."""

    @abstractmethod
    async def load(self, handle: StateHandle, transport: StateTransport, adapter: str = "") -> LoadTimes:
        """Takes over the weights of ``handle``, a whole version, and reuses nothing that was computed with the former
        ones. To be called without requests of this ``adapter``, after ``interrupt``.

        ``adapter``: the weights are an adapter of this name over the engine's base. Adapters of other names stay, and
        their requests continue. Empty: the weights are a whole model, the only one of the engine.

        Raises EngineFailed, the errors of ``StateTransport.get`` and RequestsInFlight. After an error, and after a
        cancellation, nothing may be generated with this adapter before a later ``load`` of it has succeeded.
        """

    async def replay(self, prompt: tuple[int, ...], routes: Routes) -> EngineResult | None:
        """See ``StepEngine.replay``. Raises EngineFailed."""
        return None

    async def digests(self) -> Mapping[str, int]:
        """See ``StepEngine.digests``. Raises EngineFailed."""
        return {}

    @abstractmethod
    def statistics(self) -> EngineStatistics:
        """The counters; at any time, also after ``close``."""

    @abstractmethod
    async def wait_closed(self) -> None:
        """Returns once the engine was closed. Raises EngineFailed as soon as it is broken: all its requests have
        ended with that error then, and every later call raises it."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the engine and frees its memory; requests that are left raise EngineFailed. May be called again."""
