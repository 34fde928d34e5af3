"""The embedded engine: continuous batching over a Hugging Face causal language model.

    add ─> queue ──prefill──> rows of the slot cache ──decode, all rows at once──> finished
             (new prompts together, padded;            (one token per row and step)
              a long one in chunks)

Sequences join and leave between any two steps. A step is at most one forward over prompts, of at most ``prefill_chunk``
tokens, and one forward of the running rows, attending to as many columns as the longest of them has, with a handful of
vectorised operations. Keys and values of prompts and answers are kept for later prompts that begin with them.

Row 0 belongs to the prompt that is computed in chunks, if there is one; the running rows are next to it.
"""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from .....core.telemetry import get_logger
from .....transport.state_dict import without_ties
from ....errors import InvalidRequest, NonFiniteLogits, PromptTooLong, RequestsInFlight
from ....expert_routes import Routes, widen
from ....pretrained import leave_out_cudnn
from ....routers import RouteRecorder, recorder_of
from ..engine import EngineRequest, EngineResult, EngineStatistics, FinishReason, Phases
from ..request_times import RequestTimes
from ..step_engine import StepEngine
from ..tensor_digest import digests_of
from .decode_plan import PLAN_STEPS, ActiveSequence, DecodePlan, new_tokens, sampling_of
from .forward import Forward, ModuleForward
from .key_value_memory import KeyValueMemory
from .llama_forward import TOLERANCE, FusedLlamaForward, relative_difference, unsupported_reason
from .prompt_batch import PromptBatch, PromptPart
from .prompt_queue import Admitted, PromptQueue, Room
from .quantized_forward import QuantizedForward
from .slot_cache import SlotCache, round_up
from .supported_models import context_of, refuse_unsupported
from .token_sampling import sample_tokens, stream_keys, uniforms

log = get_logger(__name__)


@dataclass(slots=True)
class _LongPrompt:
    """The prompt that is computed in chunks; its first ``computed`` tokens are in row 0 of the cache."""

    request: EngineRequest
    computed: int


class TransformersEngine(StepEngine):
    """Generates with ``model``, on its device and in its dtype.

    The engine owns the model from now on: it replaces the attention implementation. ``eos_token_ids`` end a sequence.
    At most ``max_batch`` sequences are decoded together, of at most ``max_context`` tokens each (prompt and
    completion), by default the limit in the model's config. Prompts are computed in chunks of at most ``prefill_chunk``
    tokens, between which the running sequences get their next tokens. Keys and values take at most ``kv_cache_bytes``;
    requests wait for their memory, longest possible answer included. ``prefix_reuse``: keys and values of ended
    sequences are kept for prompts that begin with the same tokens, as long as there is memory, until the weights
    change. ``quantized``: the linear layers compute in eight bits. ``records_routes``: results have the experts of
    their tokens, by the model's own forward. Raises UnsupportedModel for architectures that don't keep all keys and
    values of all layers (sliding windows, linear attention), or that can't be quantised.

    It is one class because admission, prefill, decode and release all move the same rows of one cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Collection[int],
        *,
        max_batch: int,
        max_context: int | None = None,
        prefill_chunk: int = 512,
        kv_cache_bytes: int = 4 * 2**30,
        prefix_reuse: bool = True,
        quantized: bool = False,
        records_routes: bool = False,
    ) -> None:
        leave_out_cudnn()
        config = model.config.get_text_config(decoder=True)
        self._max_context = context_of(model, max_context)
        refuse_unsupported(model, self._max_context)
        self._model: Any = model.train(False)  # Any: much of transformers' interface is untyped
        self._vocabulary: int = config.vocab_size
        self._max_batch = max_batch
        self._chunk = prefill_chunk
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._recorder = RouteRecorder(model) if records_routes else recorder_of(model, always=False)
        recorder = self._recorder if records_routes else None
        self._stock: Forward = ModuleForward(model, recorder)
        self._forward: Forward = self._stock
        self._fused_is_verified: bool | None = False  # None: not compared yet
        if quantized:
            # Not compared with the model's own forward: it differs on purpose.
            self._forward = QuantizedForward(model, self._max_context)
        elif recorder is None and unsupported_reason(model) is None:
            self._forward = FusedLlamaForward(model, self._max_context)
            self._fused_is_verified = None
            self._verify_fused()
        routes = None if recorder is None else (recorder.shape, recorder.dtype)
        self._cache = SlotCache(
            max_batch, self._max_context, self._dtype, self._device, kv_cache_bytes, routes
        )
        self._memory = KeyValueMemory(self._cache, self._forward, kv_cache_bytes, prefix_reuse)
        self._queue = PromptQueue(prefill_chunk, self._memory.known_prefix if prefix_reuse else None)
        self._stops = frozenset(eos_token_ids)
        self._rows: list[ActiveSequence] = []  # in the cache from row `_first_row` on
        self._long: _LongPrompt | None = None
        self._is_queues_turn = False  # a long prompt and the queue take turns
        self._pending = RequestTimes(time.perf_counter)
        self._finished: list[EngineResult] = []  # kept if a step raises: the next one returns them
        self._plan: DecodePlan | None = None  # None: the rows have all their tokens, and may change
        self._logits_were_finite = True  # since the cache was cleared
        self._steps = self._prompt_tokens = self._generated_tokens = self._interrupted = 0
        self._reused_tokens = self._computed_tokens = self._prefill_chunks = 0
        self._decode_steps = self._decoded_tokens = 0
        self._prefill_s = self._decode_s = 0.0

    def add(self, request: EngineRequest) -> None:
        prompt = np.array(request.prompt_tokens)
        needed = len(prompt) + request.max_new_tokens
        for limit, setting in ((self._max_context, "max_context"), (self._memory.tokens, "kv_cache_bytes")):
            if needed > limit:
                raise PromptTooLong(request.request_id, len(prompt), request.max_new_tokens, limit, setting)
        if request.request_id in self._pending:
            raise InvalidRequest(request.request_id, "the id is in use by a pending request")
        if prompt.min() < 0 or prompt.max() >= self._vocabulary:
            id_range = f"{prompt.min()}..{prompt.max()}"
            raise InvalidRequest(
                request.request_id,
                f"prompt tokens {id_range} are not all within the vocabulary of {self._vocabulary}",
            )
        self._queue.add(request)
        self._pending.add(request.request_id)

    @torch.inference_mode()
    def step(self) -> list[EngineResult]:
        if not self.pending:
            return []
        self._steps += 1
        start = time.perf_counter()
        self._compute_prompts()
        prefilled = time.perf_counter()
        if self._rows:
            self._decode()
        self._prefill_s += prefilled - start
        self._decode_s += time.perf_counter() - prefilled
        finished, self._finished = self._finished, []
        return finished

    @torch.inference_mode()
    def abort(self, request_id: str) -> EngineResult | None:
        if request_id not in self._pending:
            return None
        self._interrupted += 1
        self._end_plan()
        phases = self._pending.end(request_id)
        result = EngineResult(request_id, (), (), "interrupted", phases)
        if self._long is not None and self._long.request.request_id == request_id:
            self._end_long_prompt()
        elif not self._queue.remove(request_id):
            number = next(i for i, row in enumerate(self._rows) if row.request.request_id == request_id)
            result = self._result(number, "interrupted", phases)
            self._release([number])
        return result

    def new_tokens(self, token_counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return new_tokens(self._rows, self._plan, token_counts)

    @property
    def pending(self) -> int:
        return len(self._pending) + len(self._finished)

    def weights(self) -> dict[str, Tensor]:
        named = without_ties(self._model.state_dict(keep_vars=True))
        return {name: tensor.detach() for name, tensor in named.items()}

    @torch.inference_mode()
    def weights_loaded(self, tensors: Mapping[str, Any], adapter: str = "") -> None:
        if self.pending:
            raise RequestsInFlight(self.pending)
        self._memory.forget(self._logits_were_finite)
        self._logits_were_finite = True
        self._forward.weights_loaded()
        self._verify_fused()

    @torch.inference_mode()
    def replay(self, prompt: tuple[int, ...], routes: Routes) -> EngineResult | None:
        row, tokens = self._first_row + len(self._rows), len(prompt)
        has_room = row < self._max_batch and tokens < self._max_context
        if self._recorder is None or self._forward is not self._stock or not has_room:
            return None
        self._end_plan()
        self._reserve(1, tokens + 1)
        with self._recorder.replaying(torch.from_numpy(widen(routes)).to(self._device)):
            logits = self._prefill_parts([PromptPart(prompt)], row)
        chosen = self._cache.routes_of(row, tokens)
        if chosen is None:
            chosen = self._recorder.take()
        logprob, token = logits[0].double().log_softmax(-1).max(-1)
        if not torch.isfinite(logprob):
            self._logits_were_finite = False
            raise NonFiniteLogits(("replay",))
        return EngineResult("replay", (int(token),), (float(logprob),), "length", routes=chosen.cpu().numpy())

    def digests(self) -> dict[str, int]:
        return digests_of(self.weights())

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            interrupted=self._interrupted,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            batch_occupancy=self._decoded_tokens / (max(1, self._decode_steps) * self._max_batch),
            running=len(self._rows) + self._first_row,
            waiting=len(self._queue),
            cache_tokens=self._cache.capacity_tokens,
            reused_tokens=self._reused_tokens,
            computed_tokens=self._computed_tokens,
            prefill_chunks=self._prefill_chunks,
            decoded_tokens=self._decoded_tokens,
            kept_tokens=self._memory.kept_tokens,
            queue_s=self._pending.queue_s,
            service_s=self._pending.service_s,
        )

    # ------------------------------------------------------------------ memory and weights

    @torch.inference_mode()
    def _verify_fused(self) -> None:
        """Compares the fused forward with the model's own, once weights are loaded; drops it if it differs."""
        if self._fused_is_verified is not None:
            return
        difference = relative_difference(self._forward, self._stock, self._model)
        if difference is None:
            return
        self._fused_is_verified = difference <= TOLERANCE[self._dtype]
        if not self._fused_is_verified:
            log.warning(
                "the fused forward differs from the model's own, which is used instead",
                model=type(self._model).__name__,
                relative_difference=difference,
                tolerance=TOLERANCE[self._dtype],
            )
            self._forward = self._stock

    def _reserve(self, new_rows: int, columns: int) -> None:
        """Makes room for ``new_rows`` more rows, and for ``columns`` columns in every row.

        Running rows need theirs until the next plan of decode steps ends.
        """
        for row in self._rows:
            columns = max(columns, row.position + min(PLAN_STEPS, row.steps_left))
        if self._long is not None:
            columns = max(columns, len(self._long.request.prompt_tokens) + 1)
        self._memory.reserve(self._first_row + len(self._rows) + new_rows, columns)

    # ------------------------------------------------------------------ prompts

    @property
    def _first_row(self) -> int:
        return 0 if self._long is None else 1

    def _compute_prompts(self) -> None:
        """Computes at most one chunk: of the long prompt, or the prompts that leave the queue."""
        if self._long is None or self._is_queues_turn:
            self._is_queues_turn = False
            if self._queue.is_due(len(self._rows) + self._first_row, self._max_batch):
                group = self._next_group()
                if group and not self._queue.is_long(group[0]):
                    self._prefill(group)
                    return
                if group:
                    self._begin_long_prompt(group[0])
        if self._long is not None:
            self._is_queues_turn = True
            self._advance_long_prompt(self._long)

    def _next_group(self) -> list[Admitted]:
        running = [row.request for row in self._rows]
        running += [self._long.request] if self._long is not None else []
        columns = max((len(request.prompt_tokens) + request.max_new_tokens for request in running), default=0)
        room = Room(len(running), round_up(columns), self._max_batch, self._memory.tokens)
        return self._queue.take(room, self._long is None)

    def _begin_long_prompt(self, admitted: Admitted) -> None:
        """Gives row 0 to a long prompt; the sequence there moves to the end."""
        self._end_plan()
        request = admitted.request
        self._pending.begin(request.request_id)
        self._reserve(1, len(request.prompt_tokens) + 1)
        if self._rows:
            self._cache.move([0], [len(self._rows)], self._rows[0].position)
            self._rows.append(self._rows.pop(0))
        self._cache.put(0, admitted.prefix.pieces)
        self._reused_tokens += admitted.prefix.tokens
        self._long = _LongPrompt(request, admitted.prefix.tokens)

    def _advance_long_prompt(self, long: _LongPrompt) -> None:
        """Computes the next chunk; behind the last one, the row joins the running ones."""
        prompt, start = long.request.prompt_tokens, long.computed
        part = PromptPart(prompt[start : start + self._chunk], start)
        logits = self._prefill_parts([part], 0)
        if part.end == len(prompt):
            new, tokens = self._first_tokens([long.request], logits)
            self._end_plan()
            self._rows[:0] = new
            self._long = None
            self._add_rows(0, 1, tokens)
        else:
            long.computed = part.end

    def _end_long_prompt(self) -> None:
        """Drops the long prompt; the last row takes row 0."""
        if self._rows:
            self._cache.move([len(self._rows)], [0], self._rows[-1].position)
            self._rows.insert(0, self._rows.pop())
        self._long = None

    def _prefill(self, group: list[Admitted]) -> None:
        """Computes the prompts of ``group`` and samples the first token of each; they become the last rows."""
        self._end_plan()
        first = len(self._rows)
        for admitted in group:
            self._pending.begin(admitted.request.request_id)
        try:
            logits = self._compute_group(group)
            new, tokens = self._first_tokens([admitted.request for admitted in group], logits)
        except NonFiniteLogits:
            self._queue.put_back(group)
            raise
        self._rows += new
        self._reused_tokens += sum(admitted.prefix.tokens for admitted in group)
        self._add_rows(first, len(group), tokens)

    def _compute_group(self, group: list[Admitted]) -> Tensor:
        """Logits [n, vocabulary] behind each prompt; each gets a row, but equal prompts are computed once."""
        distinct = {admitted.request.prompt_tokens: admitted for admitted in group}
        numbers = {prompt: number for number, prompt in enumerate(distinct)}
        longest = max(len(prompt) for prompt in distinct)
        self._reserve(len(group), longest + 1)
        first = self._first_row + len(self._rows)
        for number, admitted in enumerate(distinct.values(), first):
            self._cache.put(number, admitted.prefix.pieces)
        logits = self._prefill_parts([admitted.rest for admitted in distinct.values()], first)
        if len(distinct) == len(group):
            return logits
        chosen = [numbers[admitted.request.prompt_tokens] for admitted in group]
        self._cache.move([first + n for n in chosen], list(range(first, first + len(group))), longest)
        return logits.index_select(0, torch.tensor(chosen, device=self._device))

    def _prefill_parts(self, parts: Sequence[PromptPart], first: int) -> Tensor:
        self._prefill_chunks += 1
        batch = PromptBatch.of(parts, self._cache, first)
        self._computed_tokens += batch.tokens.numel()
        return self._forward.prefill(self._cache, batch)

    def _first_tokens(
        self, requests: Sequence[EngineRequest], logits: Tensor
    ) -> tuple[list[ActiveSequence], list[int]]:
        """The sequences of ``requests``, with their first tokens; also these tokens."""
        keys = stream_keys([request.seed for request in requests])
        indices = np.array([request.resumed_tokens for request in requests])
        points = torch.from_numpy(uniforms(keys, indices)).to(self._device).unsqueeze(1)
        sampling = sampling_of(requests, self._device)
        new = [ActiveSequence(request, key) for request, key in zip(requests, keys, strict=True)]
        tokens, logprobs = self._to_lists(*sample_tokens(logits, points, sampling), new)
        for row, token, logprob in zip(new, tokens, logprobs, strict=True):
            row.add(token, logprob)
            self._pending.first_token(row.request.request_id)
        return new, tokens

    def _add_rows(self, first: int, count: int, tokens: list[int]) -> None:
        """Keeps the prompts of ``count`` new rows, and collects those that their first token ends."""
        for number in range(first, first + count):
            prompt = self._rows[number].request.prompt_tokens
            self._memory.keep(self._first_row + number, prompt)
            self._prompt_tokens += len(prompt)
        self._generated_tokens += count
        self._collect(tokens, first)

    # ------------------------------------------------------------------ decoding

    def _decode(self) -> None:
        """Samples one more token for every row."""
        plan = self._plan
        if plan is None:
            self._reserve(0, 0)
            plan = self._plan = DecodePlan(
                self._rows, self._cache, self._dtype, self._device, self._first_row
            )
        step = plan.next_step
        logits = self._forward.decode(self._cache, plan.inputs, step)
        inputs, device_logprobs = sample_tokens(logits, step.points, plan.sampling)
        tokens, logprobs = self._to_lists(inputs, device_logprobs, self._rows)
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
            self._memory.keep(self._first_row + number, row.request.prompt_tokens + tuple(row.tokens[:-1]))
            phases = self._pending.end(row.request.request_id)
            reason: FinishReason = "stop" if row.tokens[-1] in self._stops else "length"
            self._finished.append(self._result(number, reason, phases))
        self._release(finished)

    def _result(self, number: int, reason: FinishReason, phases: Phases) -> EngineResult:
        row = self._rows[number]
        return row.result(reason, phases, self._cache.routes_of(self._first_row + number, row.position))

    def _release(self, finished: list[int]) -> None:
        """Frees these rows (ascending); the last rows take their places. To be called without a plan."""
        if not finished:
            return
        rows, row_count = self._rows, len(self._rows) - len(finished)
        gone = set(finished)
        targets = [number for number in finished if number < row_count]
        sources = [number for number in range(row_count, len(rows)) if number not in gone]
        if sources:
            shift = self._first_row
            self._cache.move(
                [shift + number for number in sources],
                [shift + number for number in targets],
                max(rows[number].position for number in sources),
            )
        for source, target in zip(sources, targets, strict=True):
            rows[target] = rows[source]
        del rows[row_count:]

    def _to_lists(
        self, tokens: Tensor, logprobs: Tensor, rows: Sequence[ActiveSequence]
    ) -> tuple[list[int], list[float]]:
        """The sampled tokens and log-probabilities of ``rows`` (both [n, 1]) as lists. Raises NonFiniteLogits."""
        # Side by side, so that the host waits for the device once. A float64 has room for any token.
        device_numbers = torch.cat([tokens.to(logprobs.dtype), logprobs], 1).t()
        numbers, logprob_list = device_numbers.tolist()
        token_list = list(map(int, numbers))
        if not math.isfinite(sum(logprob_list)):
            self._logits_were_finite = False
            names = (row.request.request_id for row in rows)
            raise NonFiniteLogits(
                tuple(n for n, p in zip(names, logprob_list, strict=True) if not math.isfinite(p))
            )
        return token_list, logprob_list
