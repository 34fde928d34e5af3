"""An engine without a model: it answers with random letters, after the time that a real engine would take.

For tests and measurements of everything around engines. Sequences are decoded by continuous batching: all running ones
get their next token together, one decode step after the other, and a sequence that ends makes room for a waiting one.
The engine computes nothing and never waits: each call advances it to the time of its clock, and ``due_s`` is the time
of the next useful call. ``SimulatedEngine`` calls it on the event loop, whose time may be virtual.

``EngineTimes`` say how long steps take. From one admission or end to the next, the batch is the same and its context
grows by a token of each sequence with every step, so that the steps form an arithmetic series: the engine goes from
end to end, however many steps lie between them. Prompts delay all running sequences by the time that they add. A
sequence is admitted when keys and values of its whole prompt and answer have room: vLLM admits it earlier, and computes
a part of its sequences twice when they have outgrown the memory.

An engine whose prompts have forwards of their own takes them between two steps of the running sequences: requests that
come within a step are admitted together at its end.
"""

import heapq
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import InvalidRequest, PromptTooLong, RequestsInFlight
from ..inference_config import SimulatedEngineConfig
from .alphabet import LETTERS, Alphabet
from .engine import EngineRequest, EngineResult, EngineStatistics, FinishReason
from .request_times import RequestTimes
from .step_engine import StepEngine

_ROUNDING = 1e-6  # decode steps
_LOGPROBS = 1024
"""Log-probabilities that weights may have: as many as float32 keeps apart."""


def sample_answer(
    config: SimulatedEngineConfig, seed: int, max_new_tokens: int, alphabet: Alphabet = LETTERS
) -> tuple[tuple[int, ...], FinishReason]:
    """The tokens that ``seed`` determines: letters, and the end-of-sequence token unless they are cut off."""
    numbers = random.Random(seed)
    length = config.median_tokens * math.exp(config.sigma * numbers.gauss(0.0, 1.0))
    if length > max_new_tokens:
        return tuple(alphabet.draw(numbers, max_new_tokens)), "length"
    return (*alphabet.draw(numbers, max(1, round(length)) - 1), alphabet.end), "stop"


@dataclass(slots=True)
class _Sequence:
    request: EngineRequest
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    steps: float
    """Decode steps from its admission to its end."""
    begin: float = 0.0
    """Progress of the engine at its admission."""

    @property
    def room(self) -> int:
        """Tokens whose keys and values it has at its end."""
        return len(self.request.prompt_tokens) + len(self.tokens)

    def tokens_before(self, steps_left: float) -> int:
        """Number of tokens it has ``steps_left`` steps before its end. The last token comes at the end itself."""
        missing = math.ceil(steps_left - _ROUNDING)
        return max(0, len(self.tokens) - max(1, missing))


class SimulatedStepEngine(StepEngine):
    """``clock`` returns seconds and never goes back."""

    def __init__(
        self, config: SimulatedEngineConfig, clock: Callable[[], float], alphabet: Alphabet = LETTERS
    ) -> None:
        self._config = config
        self._costs = config.engine_times()
        self._room = math.inf if self._costs.room_tokens is None else self._costs.room_tokens
        self._alphabet = alphabet
        self._clock = clock
        self._now_s = clock()
        self._progress = 0.0  # decode steps done since the engine was last idle
        self._waiting: dict[str, _Sequence] = {}  # first come, first served
        self._active: dict[str, _Sequence] = {}
        self._ends: list[
            tuple[float, int, _Sequence]
        ] = []  # a heap of (progress at the end, order of admission, sequence)
        self._first_tokens: list[tuple[float, int, _Sequence]] = []
        """A heap of (progress at the first token, order of admission, sequence)."""
        self._finished: dict[str, EngineResult] = {}
        self._weights = {"state": np.zeros(2, np.int64)}
        self._logprobs: dict[str, float] = {}
        """The log-probability of each token, by the adapter that draws the token."""
        self._admitted = self._steps = self._prompt_tokens = self._generated_tokens = self._interrupted = 0
        self._busy_s = self._sequence_s = 0.0
        self._prompts_left_s = self._prompts_s = (
            0.0  # time of prompts that have come: still to be spent, and in all
        )
        self._prefill_chunks, self._computed_tokens = 0, 0.0
        self._joined = -1.0  # progress at the last admission
        self._reserved = 0  # tokens of all running sequences at their ends
        self._context = (
            0.0  # tokens of all running sequences, less those that they have got since their admissions
        )
        self._times = RequestTimes(lambda: self._now_s)

    # ------------------------------------------------------------------ the contract of engines

    def add(self, request: EngineRequest) -> None:
        prompt, name = request.prompt_tokens, request.request_id
        most = min(self._room, math.inf if self._config.max_context is None else self._config.max_context)
        if len(prompt) + request.max_new_tokens > most:
            raise PromptTooLong(name, len(prompt), request.max_new_tokens, int(most))
        if name in self._active or name in self._waiting or name in self._finished:
            raise InvalidRequest(name, "the id is in use by a pending request")
        if min(prompt) < 0 or max(prompt) >= self._alphabet.vocabulary:
            raise InvalidRequest(
                name, f"prompt tokens are outside the vocabulary of {self._alphabet.vocabulary}"
            )
        self._catch_up()
        whole, finish_reason = sample_answer(
            self._config, request.seed, request.resumed_tokens + request.max_new_tokens, self._alphabet
        )
        # the latter: `resumed_tokens` may exceed the tokens that the seed determines
        tokens = whole[request.resumed_tokens :] or (self._alphabet.end,)
        steps = len(tokens) - self._costs.prompt_gives_token + self._config.prompt_steps(len(prompt))
        self._waiting[name] = _Sequence(request, tokens, finish_reason, steps)
        self._times.add(name)

    def step(self) -> list[EngineResult]:
        """See ``StepEngine.step``. Advances to the time of the clock, by any number of tokens, and does not wait."""
        if not self.pending:
            return []
        self._steps += 1
        self._catch_up()
        self._admit()
        results, self._finished = list(self._finished.values()), {}
        return results

    def abort(self, request_id: str) -> EngineResult | None:
        """See ``StepEngine.abort``. A sequence that has ended by the clock is returned as finished."""
        self._catch_up()
        if (finished := self._finished.pop(request_id, None)) is not None:
            return finished
        if self._waiting.pop(request_id, None) is not None:
            self._interrupted += 1
            return EngineResult(request_id, (), (), "interrupted", self._times.end(request_id))
        if (active := self._active.get(request_id)) is None:
            return None
        self._remove(active)
        end = next(entry[0] for entry in self._ends if entry[2] is active)
        self._ends = [entry for entry in self._ends if entry[2] is not active]
        heapq.heapify(self._ends)
        tokens = active.tokens[: self._count_tokens(active, end)]
        self._generated_tokens += len(tokens)
        self._interrupted += 1
        phases = self._times.end(request_id)
        self._admit()
        logprobs = self._logprobs_of(active, len(tokens))
        return EngineResult(request_id, tokens, logprobs, "interrupted", phases)

    def new_tokens(self, token_counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """See ``StepEngine.new_tokens``: those at the time of the last call of another method."""
        tokens_by_request = {}
        for end, _, sequence in self._ends:
            name = sequence.request.request_id
            if name in token_counts:
                tokens = sequence.tokens[token_counts[name] : self._count_tokens(sequence, end)]
                if tokens:
                    tokens_by_request[name] = tokens
        return tokens_by_request

    @property
    def token_due_s(self) -> float:
        """Time of the clock at which every running sequence has one more token; infinity if idle."""
        return self._now_s + self._prompts_left_s + self._seconds_of(1.0) if self._active else math.inf

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._active) + len(self._finished)

    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """``state``: int64 [2], the policy's version and a digest of its training samples."""
        return self._weights

    def weights_loaded(self, tensors: Mapping[str, Any], adapter: str = "") -> None:
        sequences = (*self._waiting.values(), *self._active.values())
        if pending := sum(sequence.request.adapter == adapter for sequence in sequences):
            raise RequestsInFlight(pending)
        # The weights decide the log-probabilities, as in any engine: so the trainer's sums differ if a turn was drawn
        # by others than its version's. By a thousandth at most: the alphabet's is what a reader expects.
        share = int(tensors["state"][1]) % _LOGPROBS / _LOGPROBS
        self._logprobs[adapter] = self._alphabet.logprob * (1.0 + share / 1000.0)

    def _logprobs_of(self, sequence: _Sequence, count: int) -> tuple[float, ...]:
        return (self._logprobs.get(sequence.request.adapter, self._alphabet.logprob),) * count

    def statistics(self) -> EngineStatistics:
        prompt_steps = self._config.prompt_steps(self._prompt_tokens)
        share = prompt_steps / max(1.0, prompt_steps + self._generated_tokens)
        prefill_s = self._prompts_s + (self._busy_s - self._prompts_s) * share
        return EngineStatistics(
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            interrupted=self._interrupted,
            prefill_s=prefill_s,
            decode_s=self._busy_s - prefill_s,
            batch_occupancy=self._sequence_s / (self._busy_s * self._config.max_batch)
            if self._busy_s
            else 0.0,
            running=len(self._active),
            waiting=len(self._waiting),
            cache_tokens=0,
            computed_tokens=round(self._computed_tokens),
            prefill_chunks=self._prefill_chunks,
            queue_s=self._times.queue_s,
            service_s=self._times.service_s,
        )

    # ------------------------------------------------------------------ time

    @property
    def due_s(self) -> float:
        """Time of the clock at which the next ``step`` is useful if no other call comes first; infinity if idle."""
        if self._finished or self._can_admit():
            return self._now_s
        return min(self._next_end_s(), self._next_joining_s())

    def _next_end_s(self) -> float:
        return self._time_of(self._ends[0][0]) if self._ends else math.inf

    def _next_joining_s(self) -> float:
        """Time at which a waiting sequence joins the running ones, if it waits for the end of their step alone."""
        waits = self._costs.prompt_gives_token and self._active and self._has_room()
        return self._time_of(self._step_end) if waits else math.inf

    @property
    def _step_end(self) -> float:
        """Progress at the end of the present step, which began with the prompts that came last."""
        return max(self._joined + 1.0, math.ceil(self._progress - _ROUNDING))

    def _time_of(self, progress: float) -> float:
        return self._now_s + self._prompts_left_s + self._seconds_of(progress - self._progress)

    def _next_steps(self) -> tuple[float, float]:
        """Seconds of the next step, and of each further one beyond the one before it."""
        batch = len(self._active)
        context = self._context + batch * self._progress
        step_s = self._costs.decode_s(batch, context)
        return step_s, self._costs.decode_s(batch, context + batch) - step_s

    def _seconds_of(self, steps: float) -> float:
        """The sum of the series of the next ``steps``, also of a part of a step."""
        step_s, growth_s = self._next_steps()
        return steps * (step_s + growth_s * (steps - 1.0) / 2) if growth_s else steps * step_s

    def _steps_in(self, seconds: float) -> float:
        """The inverse of ``_seconds_of``."""
        step_s, growth_s = self._next_steps()
        if not growth_s:
            return seconds / step_s
        first_s = step_s - growth_s / 2
        return 2 * seconds / (first_s + math.sqrt(first_s * first_s + 2 * growth_s * seconds))

    def _catch_up(self) -> None:
        """Advances to the time of the clock, from end to end: each end makes room at its own time."""
        now_s = self._clock()
        while self._ends:
            end_s, joining_s = self._next_end_s(), self._next_joining_s()
            if min(end_s, joining_s) > now_s:
                break
            progress = self._ends[0][0] if end_s <= joining_s else self._step_end
            self._note_first_tokens(progress)
            self._spend_until(min(end_s, joining_s))
            self._prompts_left_s = 0.0
            self._progress = progress
            # All that end with this step, before prompts of others delay those that are left.
            while self._ends and self._ends[0][0] <= self._progress:
                self._finish(heapq.heappop(self._ends)[2])
            self._admit()
        if self._active:
            elapsed_s = now_s - self._now_s
            prompts_s = min(self._prompts_left_s, elapsed_s)
            progress = self._progress + self._steps_in(elapsed_s - prompts_s)
            if prompts_s >= self._prompts_left_s:
                self._note_first_tokens(progress)
            self._prompts_left_s -= prompts_s
            self._progress = progress
        self._spend_until(now_s)

    def _note_first_tokens(self, progress: float) -> None:
        """Notes the time of each first token until the engine has made ``progress``, in the present batch."""
        while self._first_tokens and self._first_tokens[0][0] <= progress:
            first, _, sequence = heapq.heappop(self._first_tokens)
            name = sequence.request.request_id
            if self._active.get(name) is sequence:  # else it was aborted
                steps_s = self._seconds_of(max(0.0, first - self._progress))
                self._times.first_token(name, self._now_s + self._prompts_left_s + steps_s)

    def _spend_until(self, now_s: float) -> None:
        if self._active:
            self._busy_s += now_s - self._now_s
            self._sequence_s += len(self._active) * (now_s - self._now_s)
        self._now_s = now_s

    def _can_admit(self) -> bool:
        within_step = self._costs.prompt_gives_token and self._active and self._progress < self._step_end
        return self._has_room() and not within_step

    def _has_room(self) -> bool:
        """True if a sequence waits for whose keys and values there is room."""
        if not self._waiting or len(self._active) >= self._config.max_batch:
            return False
        return self._reserved + next(iter(self._waiting.values())).room <= self._room

    def _admit(self) -> None:
        if not self._active:
            self._progress = self._context = self._prompts_left_s = 0.0
            self._joined = -1.0
            self._first_tokens.clear()
        batch, prompts = len(self._active), []
        while self._can_admit():
            name = next(iter(self._waiting))
            self._active[name] = sequence = self._waiting.pop(name)
            self._times.begin(name)
            self._admitted += 1
            prompt_tokens = len(sequence.request.prompt_tokens)
            prompts.append(prompt_tokens * self._config.computed_share)
            self._prompt_tokens += prompt_tokens
            self._reserved += sequence.room
            self._context += prompt_tokens - self._progress
            sequence.begin = self._progress
            heapq.heappush(self._ends, (self._progress + sequence.steps, self._admitted, sequence))
            first = self._progress + sequence.steps - len(sequence.tokens) + 1
            heapq.heappush(self._first_tokens, (first, self._admitted, sequence))
        if prompts:
            self._joined = self._progress
            self._prefill_chunks += 1
            self._computed_tokens += sum(prompts)
            prompts_s = self._costs.prefill_s(prompts, batch)
            self._prompts_left_s += prompts_s
            self._prompts_s += prompts_s

    def _count_tokens(self, sequence: _Sequence, end: float) -> int:
        """Number of tokens that a running sequence has. ``end``: the progress at its last token."""
        is_prompt_left = self._prompts_left_s > 0.0 and sequence.begin == self._progress
        return 0 if is_prompt_left else sequence.tokens_before(end - self._progress)

    def _remove(self, sequence: _Sequence) -> None:
        """A running sequence has ended or is aborted."""
        del self._active[sequence.request.request_id]
        self._reserved -= sequence.room
        self._context -= len(sequence.request.prompt_tokens) - sequence.begin

    def _finish(self, sequence: _Sequence) -> None:
        name, tokens = sequence.request.request_id, sequence.tokens
        self._remove(sequence)
        phases = self._times.end(name)
        self._generated_tokens += len(tokens)
        logprobs = self._logprobs_of(sequence, len(tokens))
        self._finished[name] = EngineResult(name, tokens, logprobs, sequence.finish_reason, phases)
