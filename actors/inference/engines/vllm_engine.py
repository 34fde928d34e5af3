"""vLLM as a step engine: its scheduler, model and cache in the instance's process, driven by ``ThreadedEngine``.

    add ──> LLMEngine.add_request ──> step: LLMEngine.step, one token of every running request ──> finished

``LLMEngine`` and not ``AsyncLLM``: that one starts another process for the scheduler, sends it pickles over ZeroMQ, and
takes 16 s to start on a CPU. Here an engine that dies is an instance that dies: it is noticed and restarted like any
other. With tensor parallelism vLLM starts one process for each device, on CPUs and GPUs alike.
"""

import math
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from ....core.base.texts import text_of
from ....transport.handle import StateHandle
from ....transport.state_dict import without_ties
from ...errors import EngineFailed, InvalidRequest, NonFiniteLogits, PromptTooLong, RequestsInFlight
from ...expert_routes import Routes
from ...messages import ModelConfig, Truncation
from ...pretrained import outline_of
from ..inference_config import VllmEngineConfig
from ..instance_setup import ServedBase
from .engine import EngineRequest, EngineResult, EngineStatistics, FinishReason, Phases
from .hugging_face_factory import HuggingFaceFactory
from .request_times import RequestTimes
from .step_engine import StepEngine
from .vllm_adapters import AdapterVersions
from .vllm_arguments import engine_arguments
from .vllm_grammar import grammar_of
from .vllm_memory import check_memory
from .vllm_routes import routes_of_part, routes_so_far
from .vllm_weights import WholeVersions

TEMPERATURES: Final = (0.01, 2.0)
"""vLLM samples with the first if a lower one is asked for, except 0, and refuses those above the second."""

_ALL: Final = Truncation()

_FINISHED: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length"}


class VllmFactory(HuggingFaceFactory[VllmEngineConfig]):
    """Serves a Hugging Face causal language model that vLLM knows."""

    def _build(self) -> StepEngine:
        outline = outline_of(self._model)
        source = None if self._base is None else (self._model, self._base)
        return VllmEngine(
            outline,
            self._end_tokens(outline),
            self._options,
            source,
            self._tokenizer,
            records_routes=self._model.router_replay,
        )


@dataclass(slots=True)
class _Turn:
    """A request that has not ended, and its tokens so far."""

    request: EngineRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def result(
        self, finish_reason: FinishReason, phases: Phases, routes: Routes | None = None
    ) -> EngineResult:
        name = self.request.request_id
        return EngineResult(name, tuple(self.tokens), tuple(self.logprobs), finish_reason, phases, routes)


class VllmEngine(StepEngine):
    """Generates with vLLM. ``outline``, a model on the device ``meta``, gives the architecture.

    ``eos_token_ids`` end a sequence. ``base``: vLLM loads this model's weights at the start, and each version is a LoRA
    adapter over it, several of which compute in one batch; None: each version is a whole model. ``tokenizer``: for
    answers that are held to forms, as grammars of its tokens; None: the engine holds no answers to forms.
    ``records_routes``: results have the experts of their tokens.
    All calls come from the thread that it is built in. Raises NoDeviceMemory if a GPU has too little free memory, and
    what vLLM raises if it can't run the model or has no room for one sequence.

    With asynchronous scheduling vLLM begins a batch before the tokens of the one before are there. So a batch may be
    in flight whose requests have all ended. It needs no wait: the device computes it ahead of new weights and of later
    batches, and vLLM drops its tokens at the next step.
    """

    def __init__(
        self,
        outline: PreTrainedModel,
        eos_token_ids: Collection[int],
        options: VllmEngineConfig,
        base: tuple[ModelConfig, ServedBase] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        records_routes: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="flexmarl-vllm-")
        try:
            if current_platform.is_cuda():
                check_memory(outline, options)
            self._llm = LLMEngine.from_engine_args(
                engine_arguments(
                    outline, options, self._folder.name, base, tokenizer, records_routes=records_routes
                )
            )
        except BaseException:
            self._folder.cleanup()
            raise
        model_config, cache_config = self._llm.model_config, self._llm.vllm_config.cache_config
        self._max_context: int = model_config.max_model_len
        self._vocabulary: int = model_config.get_vocab_size()
        self._cache_tokens = (cache_config.num_gpu_blocks or 0) * cache_config.block_size
        self._stops = sorted(eos_token_ids)
        self._max_batch = options.max_batch
        self._loads = 0
        self._turns: dict[str, _Turn] = {}
        self._ready: list[EngineResult] = []
        self._refused: list[str] = []
        """Requests whose grammar vLLM has given up."""
        self._is_stained = False
        """A request with logits that are not finite has left keys and values like them."""
        self._counted = _Counted()
        self._versions: WholeVersions | AdapterVersions | None = None
        try:
            if base is None:
                tensors = without_ties(outline.state_dict(keep_vars=True))
                self._versions = WholeVersions(self._llm, tensors, in_place=options.tensor_parallel == 1)
            else:
                self._versions = AdapterVersions(self._llm)
            self._compute_a_token()
        except BaseException:
            self.close()
            raise

    def _compute_a_token(self) -> None:
        """A model that vLLM has no kernels for fails here and not in the first turn."""
        self.add(EngineRequest("first", (0,), 0, 0.0, 1))
        while self._turns:
            for output in self._llm.step():
                del self._turns[output.request_id]
        self._counted = _Counted()

    # ------------------------------------------------------------------ requests

    def add(self, request: EngineRequest) -> None:
        name, prompt = request.request_id, request.prompt_tokens
        self._refuse(request)
        cut = request.truncation or _ALL
        params = SamplingParams(
            temperature=request.temperature,
            top_k=cut.top_k,
            top_p=cut.top_p,
            min_p=cut.min_p,
            seed=_seed(request),
            max_tokens=request.max_new_tokens,
            stop_token_ids=self._stops,
            ignore_eos=True,  # it is one of ours
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=grammar_of(request),
        )
        lora = self._loaded.lora_of(request.adapter)
        if request.adapter and lora is None:
            raise InvalidRequest(name, f"there is no adapter {request.adapter}")
        try:
            self._llm.add_request(name, tokens_input(list(prompt)), params, lora_request=lora)
        except (ValueError, RecursionError, VLLMClientError) as error:
            raise InvalidRequest(name, f"vLLM refuses it: {text_of(error.__cause__ or error)}") from error
        self._turns[name] = _Turn(request)
        self._counted.added(request)

    def _refuse(self, request: EngineRequest) -> None:
        name, prompt = request.request_id, request.prompt_tokens
        if name in self._turns:
            raise InvalidRequest(name, "the id is in use by a pending request")
        if len(prompt) + request.max_new_tokens > self._max_context:
            raise PromptTooLong(name, len(prompt), request.max_new_tokens, self._max_context)
        if not 0 <= min(prompt) <= max(prompt) < self._vocabulary:
            raise InvalidRequest(name, f"a token is outside the vocabulary of {self._vocabulary}")
        least, most = TEMPERATURES
        if request.temperature and not least <= request.temperature <= most:
            raise InvalidRequest(
                name, f"temperature is {request.temperature}, vLLM takes 0 and {least} to {most}"
            )

    def step(self) -> list[EngineResult]:
        results, self._ready = self._ready, []
        if not self._turns:
            return results
        if self._refused:
            self._ready = results
            raise InvalidRequest(self._refused.pop(), "vLLM has given up the grammar of its answer")
        began = time.perf_counter()
        if self._is_stained:
            self._llm.collective_rpc("clean_keys_and_values")
            self._is_stained = False
        outputs: list[Any] = self._llm.step()
        broken = []
        first_tokens = 0
        for output in outputs:
            turn, part = self._turns[output.request_id], output.outputs[0]
            if part.finish_reason == "error" and turn.request.forms:
                self._refused.append(output.request_id)
                continue
            if not turn.tokens:
                first_tokens += 1
                self._counted.begun(turn.request, output.num_cached_tokens or 0)
            logprobs: Sequence[float] = part.logprobs.logprobs
            turn.tokens += part.token_ids
            turn.logprobs += logprobs
            if not all(map(math.isfinite, logprobs)):
                broken.append(output.request_id)
            elif output.finished:
                results.append(self._finish(turn, part))
        self._counted.step(time.perf_counter() - began, len(outputs), first_tokens)
        if broken:
            self._is_stained = True
            self._ready = results
            raise NonFiniteLogits(tuple(broken))
        return results

    def _finish(self, turn: _Turn, part: Any) -> EngineResult:
        """Raises EngineFailed if vLLM ended the turn for a reason of its own, or other weights generated a token."""
        spans = [(span.version, span.start, span.end) for span in part.weight_versions or ()]
        loaded = self._loaded.model_version
        if spans != [(loaded, 0, len(turn.tokens))] or part.finish_reason not in _FINISHED:
            raise EngineFailed(
                f"vLLM ended request {turn.request.request_id} with {part.finish_reason}, its tokens are of the loads "
                f"{spans}, the last load of the model is {loaded}"
            )
        del self._turns[turn.request.request_id]
        routes = routes_of_part(self._llm, part)
        return turn.result(_FINISHED[part.finish_reason], self._counted.ended(turn.request), routes)

    def abort(self, request_id: str) -> EngineResult | None:
        turn = self._turns.pop(request_id, None)
        if turn is None:
            return None
        computed = len(turn.request.prompt_tokens) + len(turn.tokens) - 1
        routes = routes_so_far(self._llm, request_id, computed) if turn.tokens else None
        self._llm.abort_request([request_id])
        return turn.result("interrupted", self._counted.ended(turn.request, interrupted=True), routes)

    def new_tokens(self, token_counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        tokens_by_request = {
            name: tuple(turn.tokens[number:])
            for name, number in token_counts.items()
            if (turn := self._turns.get(name)) is not None
        }
        return {name: tokens for name, tokens in tokens_by_request.items() if tokens}

    @property
    def pending(self) -> int:
        return len(self._turns) + len(self._ready)

    # ------------------------------------------------------------------ weights

    @property
    def reads_in_place(self) -> bool:
        return self._loaded.reads_in_place

    @property
    def _loaded(self) -> WholeVersions | AdapterVersions:
        assert self._versions is not None, "the constructor sets it"
        return self._versions

    def weights(self) -> dict[str, Any]:
        return self._loaded.tensors

    def room_for(self, handle: StateHandle) -> dict[str, Any]:
        return self._loaded.room_for(handle)

    def weights_loaded(self, tensors: Mapping[str, Any], adapter: str = "") -> None:
        """See ``StepEngine``. Raises EngineFailed after an error of vLLM's: it may hold a part of the weights."""
        if pending := sum(turn.request.adapter == adapter for turn in self._turns.values()):
            raise RequestsInFlight(pending)
        try:
            self._loaded.install(tensors, self._loads + 1, adapter)
        except Exception as error:
            raise EngineFailed(
                f"vLLM could not take over new weights and may hold a part of them: {text_of(error)}"
            ) from error
        self._loads += 1

    def digests(self) -> dict[str, int]:
        """See ``StepEngine``. By names of vLLM's own: it joins and packs tensors, and of several workers each has its
        part. Empty with adapters: the model's parameters are those of the base."""
        return {} if isinstance(self._loaded, AdapterVersions) else self._loaded.digests()

    # ------------------------------------------------------------------ the rest

    def statistics(self) -> EngineStatistics:
        return self._counted.statistics(self._max_batch, self._cache_tokens)

    def close(self) -> None:
        self._llm.engine_core.shutdown()
        if self._versions is not None:
            self._versions.close()
        del self._versions, self._llm
        cleanup_dist_env_and_memory()
        self._folder.cleanup()


@dataclass(slots=True)
class _Counted:
    """The figures of ``EngineStatistics``. A request begins with its first token, and a step that gives a first token
    counts as prefill."""

    steps: int = 0
    steps_with_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: int = 0
    interrupted: int = 0
    prefill_chunks: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    running: int = 0
    times: RequestTimes = field(default_factory=lambda: RequestTimes(time.perf_counter))

    def added(self, request: EngineRequest) -> None:
        self.times.add(request.request_id)

    def begun(self, request: EngineRequest, reused_tokens: int) -> None:
        self.running += 1
        self.times.begin(request.request_id)
        self.prompt_tokens += len(request.prompt_tokens)
        self.reused_tokens += reused_tokens

    def ended(self, request: EngineRequest, *, interrupted: bool = False) -> Phases:
        """The begin of a prompt in vLLM's scheduler is unknown: the wait there is a part of the prefill."""
        self.interrupted += interrupted
        self.running -= self.times.has_begun(request.request_id)
        first_token_s, _ = self.times.end(request.request_id)
        return Phases(0.0, first_token_s)

    def step(self, seconds: float, tokens: int, first_tokens: int) -> None:
        self.steps += 1
        self.steps_with_tokens += bool(tokens)
        self.generated_tokens += tokens
        self.first_tokens += first_tokens
        if first_tokens or not tokens:  # without tokens: a part of a long prompt
            self.prefill_chunks += 1
            self.prefill_s += seconds
        else:
            self.decode_s += seconds

    def statistics(self, max_batch: int, cache_tokens: int) -> EngineStatistics:
        rows = self.steps_with_tokens * max_batch
        return EngineStatistics(
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            interrupted=self.interrupted,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            batch_occupancy=self.generated_tokens / rows if rows else 0.0,
            running=self.running,
            waiting=len(self.times) - self.running,
            cache_tokens=cache_tokens,
            reused_tokens=self.reused_tokens,
            computed_tokens=self.prompt_tokens - self.reused_tokens,
            prefill_chunks=self.prefill_chunks,
            decoded_tokens=self.generated_tokens - self.first_tokens,
            queue_s=self.times.queue_s,
            service_s=self.times.service_s,
        )


def _seed(request: EngineRequest) -> int:
    """A resumed request draws other numbers than its beginning did."""
    return xxhash.xxh3_64_intdigest(f"{request.seed} {request.resumed_tokens}".encode()) >> 1
