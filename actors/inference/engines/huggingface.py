"""The embedded engine: continuous batching over a Hugging Face causal language model.

    add ─> waiting ──prefill──> rows 0..n-1 of the slot cache ──decode, all rows at once──> finished
              (new prompts together, padded)         (one token per row and step)

Sequences join and leave between any two steps. A step is one forward of the model over the running rows, attending
to as many columns as the longest of them has, and a handful of vectorised operations.
"""

import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....core.telemetry import get_logger
from ....transport.state_dict import without_ties
from ...errors import InvalidRequest, NonFiniteLogits, PromptTooLong, RequestsInFlight, UnsupportedModel
from ...model_sources import rotation_limit
from .decode_plan import ActiveSequence, DecodePlan
from .engine import EngineRequest, EngineResult, EngineStatistics
from .forward import Forward, ModuleForward
from .llama_forward import TOLERANCE, FusedLlamaForward, relative_difference, unsupported_reason
from .slot_cache import SlotCache
from .step_engine import StepEngine
from .token_sampling import Temperatures, sample_tokens, stream_keys, uniforms

log = get_logger(__name__)

# Prompts are computed in groups of at most this many tokens, with padding, without repetitions: it bounds the memory
# of the activations.
PREFILL_TOKENS = 16384
# With small models a prefill costs about as much as a decode step. So new requests wait until they are this share of
# the running rows, but at most this number of steps.
ADMIT_SHARE = 1 / 8
ADMIT_STEPS = 8


class TransformersEngine(StepEngine):
    """Generates with ``model``, on its device and in its dtype.

    The engine owns the model from now on: it replaces the attention implementation. ``eos_token_ids`` end a sequence.
    At most ``max_batch`` sequences are decoded together, of at most ``max_context`` tokens each (prompt and
    completion), by default the limit in the model's config. Raises UnsupportedModel for architectures that don't keep
    all keys and values of all layers (sliding windows, linear attention).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Collection[int],
        *,
        max_batch: int,
        max_context: int | None = None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        self._max_context = _context(model, max_context)
        _refuse_unsupported(model, self._max_context)
        self._model: Any = model.train(False)  # Any: much of transformers' interface is untyped
        self._vocabulary: int = config.vocab_size
        self._max_batch = max_batch
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        with torch.inference_mode():
            self._cache = SlotCache(max_batch, self._max_context, self._dtype, self._device)
        self._stock: Forward = ModuleForward(model)
        self._forward: Forward = self._stock
        self._fused_is_verified: bool | None = False  # None: not compared yet
        if unsupported_reason(model) is None:
            self._forward = FusedLlamaForward(model, self._max_context)
            self._fused_is_verified = None
            self._verify_fused()
        self._stops = frozenset(eos_token_ids)
        self._waiting: deque[EngineRequest] = deque()
        self._rows: list[ActiveSequence] = []
        self._ids: set[str] = set()  # of all waiting and running requests
        self._finished: list[EngineResult] = []  # kept if a step raises: the next one returns them
        self._held_steps = 0
        self._plan: DecodePlan | None = None  # None: the rows have all their tokens, and may change
        self._steps = self._prompt_tokens = self._generated_tokens = self._interrupted = 0
        self._decode_steps = self._decoded_tokens = 0
        self._prefill_s = self._decode_s = 0.0

    def add(self, request: EngineRequest) -> None:
        prompt = np.array(request.prompt_tokens)
        if len(prompt) + request.max_new_tokens > self._max_context:
            raise PromptTooLong(request.request_id, len(prompt), request.max_new_tokens, self._max_context)
        if request.request_id in self._ids:
            raise InvalidRequest(request.request_id, "the id is in use by a pending request")
        if prompt.min() < 0 or prompt.max() >= self._vocabulary:
            found = f"{prompt.min()}..{prompt.max()}"
            raise InvalidRequest(
                request.request_id,
                f"prompt tokens {found} are not all within the vocabulary of {self._vocabulary}",
            )
        self._waiting.append(request)
        self._ids.add(request.request_id)

    @torch.inference_mode()
    def step(self) -> list[EngineResult]:
        if not self.pending:
            return []
        self._steps += 1
        start = time.perf_counter()
        if self._admission_due():
            while group := self._next_group():
                self._prefill(group)
        prefilled = time.perf_counter()
        if self._rows:
            self._decode()
        self._prefill_s += prefilled - start
        self._decode_s += time.perf_counter() - prefilled
        finished, self._finished = self._finished, []
        return finished

    @torch.inference_mode()
    def abort(self, request_id: str) -> EngineResult | None:
        if request_id not in self._ids:
            return None
        self._interrupted += 1
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                self._ids.remove(request_id)
                return EngineResult(request_id, (), (), "interrupted")
        self._end_plan()
        number = next(i for i, row in enumerate(self._rows) if row.request.request_id == request_id)
        result = self._rows[number].result("interrupted")
        self._release([number])
        return result

    @property
    def pending(self) -> int:
        return len(self._ids) + len(self._finished)

    def weights(self) -> dict[str, Tensor]:
        named = without_ties(self._model.state_dict(keep_vars=True))
        return {name: tensor.detach() for name, tensor in named.items()}

    @torch.inference_mode()
    def weights_loaded(self) -> None:
        if self.pending:
            raise RequestsInFlight(self.pending)
        self._cache.clear()
        self._verify_fused()

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            interrupted=self._interrupted,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            batch_occupancy=self._decoded_tokens / (max(1, self._decode_steps) * self._max_batch),
            running=len(self._rows),
            waiting=len(self._waiting),
            cache_tokens=self._cache.capacity_tokens,
        )

    @torch.inference_mode()
    def _verify_fused(self) -> None:
        """Compares the fused forward with the model's own, once weights are loaded; drops it if it differs."""
        if self._fused_is_verified is not None:
            return
        found = relative_difference(self._forward, self._stock, self._model)
        if found is None:
            return
        self._fused_is_verified = found <= TOLERANCE[self._dtype]
        if not self._fused_is_verified:
            log.warning(
                "the fused forward differs from the model's own, which is used instead",
                model=type(self._model).__name__,
                relative_difference=found,
                tolerance=TOLERANCE[self._dtype],
            )
            self._forward = self._stock

    def _admission_due(self) -> bool:
        active = len(self._rows)
        ready = min(len(self._waiting), self._max_batch - active)
        self._held_steps += ready > 0
        if ready == 0 or (ready < ADMIT_SHARE * active and self._held_steps < ADMIT_STEPS):
            return False
        self._held_steps = 0
        return True

    def _next_group(self) -> list[EngineRequest]:
        """The first waiting requests that fit into the free rows and one prefill; they stay in the queue."""
        group: list[EngineRequest] = []
        distinct: set[tuple[int, ...]] = set()
        longest = 0
        for request in islice(self._waiting, self._max_batch - len(self._rows)):
            distinct.add(request.prompt_tokens)
            longest = max(longest, len(request.prompt_tokens))
            if group and longest * len(distinct) > PREFILL_TOKENS:
                break
            group.append(request)
        return group

    def _prefill(self, group: list[EngineRequest]) -> None:
        """Computes the prompts of ``group`` and samples the first token of each; they become the last rows."""
        self._end_plan()
        logits = self._compute_prompts([request.prompt_tokens for request in group])
        keys = stream_keys([request.seed for request in group])
        indices = np.array([request.resumed_tokens for request in group])
        points = torch.from_numpy(uniforms(keys, indices)).to(self._device).unsqueeze(1)
        temperatures = Temperatures.of([request.temperature for request in group], self._device)
        new = [ActiveSequence(request, key) for request, key in zip(group, keys, strict=True)]
        tokens, logprobs = _to_lists(*sample_tokens(logits, points, temperatures), new)
        for row, token, logprob in zip(new, tokens, logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            self._waiting.popleft()
        self._rows += new
        self._prompt_tokens += sum(len(request.prompt_tokens) for request in group)
        self._generated_tokens += len(group)
        self._collect(tokens, len(self._rows) - len(group))

    def _compute_prompts(self, prompts: list[tuple[int, ...]]) -> Tensor:
        """Logits [n, vocabulary] behind each prompt; each gets a row, but equal prompts are computed once."""
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        lengths = [len(prompt) for prompt in numbers]
        padded = np.zeros((len(numbers), max(lengths)), np.int64)
        for line, prompt in zip(padded, numbers, strict=True):
            line[: len(prompt)] = prompt
        first = len(self._rows)
        self._cache.prefill(first, len(prompts), padded.shape[1])
        logits = self._forward.prefill(
            self._cache,
            torch.from_numpy(padded).to(self._device),
            torch.tensor(lengths, device=self._device),
        )
        if len(numbers) == len(prompts):
            return logits
        chosen = [numbers[prompt] for prompt in prompts]
        self._cache.move([first + n for n in chosen], list(range(first, first + len(prompts))), max(lengths))
        return logits.index_select(0, torch.tensor(chosen, device=self._device))

    def _decode(self) -> None:
        """Samples one more token for every row."""
        plan = self._plan
        if plan is None:
            plan = self._plan = DecodePlan(self._rows, self._cache, self._dtype, self._device)
        step = plan.next_step
        logits = self._forward.decode(self._cache, plan.inputs, step)
        inputs, device_logprobs = sample_tokens(logits, step.points, plan.temperatures)
        tokens, logprobs = _to_lists(inputs, device_logprobs, self._rows)
        plan.record(inputs, tokens, logprobs)
        self._generated_tokens += len(tokens)
        self._decoded_tokens += len(tokens)
        self._decode_steps += 1
        if plan.is_over or not self._stops.isdisjoint(tokens):
            self._end_plan()
            self._collect(tokens, 0)

    def _end_plan(self) -> None:
        if self._plan is not None:
            self._plan.finish()
            self._plan = None

    def _collect(self, tokens: list[int], first: int) -> None:
        """Collects the results of the rows from ``first`` on that their newest token ends, and frees these rows."""
        finished = [
            number
            for number, token in enumerate(tokens, first)
            if token in self._stops or self._rows[number].steps_left == 0
        ]
        for number in finished:
            row = self._rows[number]
            self._finished.append(row.result("stop" if row.tokens[-1] in self._stops else "length"))
        self._release(finished)

    def _release(self, finished: list[int]) -> None:
        """Frees these rows (ascending); the last rows take their places. To be called without a plan."""
        if not finished:
            return
        rows, left = self._rows, len(self._rows) - len(finished)
        gone = set(finished)
        targets = [number for number in finished if number < left]
        sources = [number for number in range(left, len(rows)) if number not in gone]
        self._ids -= {rows[number].request.request_id for number in finished}
        if sources:
            self._cache.move(sources, targets, max(rows[number].position for number in sources))
        for source, target in zip(sources, targets, strict=True):
            rows[target] = rows[source]
        del rows[left:]


def _to_lists(
    tokens: Tensor, logprobs: Tensor, rows: Sequence[ActiveSequence]
) -> tuple[list[int], list[float]]:
    """The sampled tokens and log-probabilities of ``rows`` (both [n, 1]) as lists. Raises NonFiniteLogits."""
    token_list: list[int] = tokens.squeeze(1).tolist()
    logprob_list: list[float] = logprobs.squeeze(1).tolist()
    if not math.isfinite(sum(logprob_list)):
        broken = (
            row.request.request_id
            for row, logprob in zip(rows, logprob_list, strict=True)
            if not math.isfinite(logprob)
        )
        raise NonFiniteLogits(tuple(broken))
    return token_list, logprob_list


def _context(model: PreTrainedModel, max_context: int | None) -> int:
    """``max_context``, checked against the limit in the model's config, or that limit by default."""
    allowed: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if max_context is None and allowed is None:
        raise UnsupportedModel(
            type(model).__name__, "its config has no max_position_embeddings: set max_context"
        )
    if max_context is not None and allowed is not None and max_context > allowed:
        raise UnsupportedModel(
            type(model).__name__,
            f"max_context is {max_context}, the model has {allowed} positions: lower max_context",
        )
    return max_context or allowed or 0


def _refuse_unsupported(model: PreTrainedModel, max_context: int) -> None:
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if others:
        raise UnsupportedModel(
            name, f"layers of type {', '.join(others)} need another cache: use another engine"
        )
    if not model._supports_attention_backend or not model._supports_sdpa:
        raise UnsupportedModel(
            name, "it has its own attention code (no AttentionInterface): use another engine"
        )
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]  # transformers
        raise UnsupportedModel(name, "it has no output embeddings: is it a causal language model?")
    rotated = rotation_limit(model.config)
    if rotated is not None and max_context > rotated:
        raise UnsupportedModel(
            name,
            f"its rotations (longrope) change behind {rotated} tokens, and max_context is {max_context}: set "
            f"engine.max_context to {rotated} or less",
        )
    window: int | None = getattr(config, "sliding_window", None)
    if window is not None and window < max_context and not getattr(config, "layer_types", None):
        raise UnsupportedModel(
            name, f"its sliding window of {window} is shorter than max_context {max_context}"
        )
