"""The engines that ``scripts/bench/run rollout`` compares, each an actor in a process of its own.

All serve the same requests with a model of the same sizes, random weights, float32 and one thread. No end token is
known to them: every sequence gets exactly the length drawn for it.
"""

import asyncio
import importlib.metadata
import importlib.util
import random
import tempfile
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import EngineRequest
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import load_model
from flexmarl.core.actor import Actor, endpoint

MAX_CONTEXT = 4096
_SIZES: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": MAX_CONTEXT, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MODEL = ModelConfig(config=_SIZES, tokenizer="none")
MAX_BATCH = 64
GENERATE_BATCH = 16
_PROMPT_TOKENS = 8, 128
_NEW_TOKENS = 4, 256
_MEDIAN_NEW_TOKENS, _SIGMA = 48, 0.8
_MEAN_GAP_S = 0.001
_SEED = 1
_RUNNING = 16
_GAP_STEPS = 100


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: ``at_s`` after the first one, ``prompt`` and the number of tokens to generate."""

    at_s: float
    prompt: tuple[int, ...]
    new_tokens: int


def workload(count: int, seed: int) -> list[Arrival]:
    """``count`` requests that arrive at random (exponential gaps); prompts of uniform, answers of lognormal lengths."""
    draw = random.Random(seed)
    at_s = 0.0
    arrivals = []
    for _ in range(count):
        prompt = tuple(draw.randrange(_SIZES["vocab_size"]) for _ in range(draw.randint(*_PROMPT_TOKENS)))
        length = round(_MEDIAN_NEW_TOKENS * draw.lognormvariate(0.0, _SIGMA))
        arrivals.append(Arrival(at_s, prompt, min(max(length, _NEW_TOKENS[0]), _NEW_TOKENS[1])))
        at_s += draw.expovariate(1 / _MEAN_GAP_S)
    return arrivals


class _Arriving:
    """The requests of a workload, as their time comes."""

    def __init__(self, arrivals: Collection[Arrival]) -> None:
        self._coming = deque(arrivals)
        self._start = time.perf_counter()

    @property
    def left(self) -> int:
        return len(self._coming)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start

    def arrived(self, at_most: int = MAX_BATCH, wait: bool = False) -> Iterator[Arrival]:
        """Those that have arrived and were not taken; ``wait``: at least one, unless none is left."""
        taken = 0
        while self._coming and taken < at_most:
            early_s = self._coming[0].at_s - self.elapsed_s
            if early_s > 0:
                if taken or not wait:
                    return
                time.sleep(early_s)
            taken += 1
            yield self._coming.popleft()


class Contender(Actor):
    """Serves workloads in a thread, so that the process answers while it computes."""

    def __init__(self, folder: str) -> None:
        """``folder``: for the files of the model."""
        self._folder = folder

    @endpoint
    async def prepare(self) -> str:
        """Loads the model; returns the name and version of the library."""
        return await asyncio.to_thread(self._prepare)

    @endpoint
    async def serve(self, count: int, seed: int) -> float:
        """Tokens per second, from the first arrival to the last token."""
        return await asyncio.to_thread(self._timed, workload(count, seed))

    def _timed(self, arrivals: list[Arrival]) -> float:
        arriving = _Arriving(arrivals)
        self._serve(arriving)
        return sum(arrival.new_tokens for arrival in arrivals) / arriving.elapsed_s

    @abstractmethod
    def _prepare(self) -> str: ...

    @abstractmethod
    def _serve(self, arriving: _Arriving) -> None: ...


def seeded_model() -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(_SEED)
    return load_model(MODEL, torch.float32).requires_grad_(False)


class Embedded(Contender):
    """The embedded engine, stepped in a loop."""

    def _prepare(self) -> str:
        self._engine = TransformersEngine(seeded_model(), [], max_batch=MAX_BATCH)
        self._in_one_piece = TransformersEngine(
            seeded_model(), [], max_batch=MAX_BATCH, prefill_chunk=MAX_CONTEXT, prefix_reuse=False
        )
        self._made = 0
        return f"flexmarl {importlib.metadata.version('flexmarl')}"

    def _serve(self, arriving: _Arriving) -> None:
        engine = self._engine
        while engine.pending or arriving.left:
            for arrival in arriving.arrived(wait=not engine.pending):
                self._made += 1
                engine.add(
                    EngineRequest(str(self._made), arrival.prompt, self._made, 1.0, arrival.new_tokens)
                )
            engine.step()

    @endpoint
    async def gaps(self, seed: int, in_chunks: bool) -> list[float]:
        """Seconds between two tokens of 16 running turns, while a prompt of maximum length arrives."""
        engine = self._engine if in_chunks else self._in_one_piece
        return await asyncio.to_thread(_gaps, engine, seed)


def _gaps(engine: TransformersEngine, seed: int) -> list[float]:
    draw = random.Random(seed)

    def add(name: str, prompt_tokens: int, new_tokens: int) -> None:
        prompt = tuple(draw.choices(range(_SIZES["vocab_size"]), k=prompt_tokens))
        engine.add(EngineRequest(name, prompt, 0, 1.0, new_tokens))

    for number in range(_RUNNING):
        add(str(number), 32, _GAP_STEPS)
    durations: list[float] = []
    while engine.pending:
        if len(durations) == _GAP_STEPS // 2:
            add("long", MAX_CONTEXT - 8, 8)
        started = time.perf_counter()
        engine.step()
        durations.append(time.perf_counter() - started)
    return durations[_GAP_STEPS // 4 : _GAP_STEPS - 1]  # as long as all are running


class Generate(Contender):
    """``model.generate`` in batches of the next requests that have arrived; a batch ends with its longest answer."""

    def _prepare(self) -> str:
        self._model = seeded_model()
        return f"transformers {importlib.metadata.version('transformers')}"

    def _serve(self, arriving: _Arriving) -> None:
        while arriving.left:
            self._generate(list(arriving.arrived(GENERATE_BATCH, wait=True)))

    def _generate(self, batch: list[Arrival]) -> None:
        longest = max(len(arrival.prompt) for arrival in batch)
        padded = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(padded)
        for line, seen, arrival in zip(padded, mask, batch, strict=True):
            line[longest - len(arrival.prompt) :] = torch.tensor(arrival.prompt)
            seen[longest - len(arrival.prompt) :] = 1
        with torch.inference_mode():
            self._model.generate(
                padded,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=max(arrival.new_tokens for arrival in batch),
                pad_token_id=0,
            )


class Vllm(Contender):
    """vLLM's engine in this process, with the log-probabilities that training needs."""

    @staticmethod
    def is_installed() -> bool:
        return importlib.util.find_spec("vllm") is not None

    def _prepare(self) -> str:
        import vllm  # type: ignore[import-not-found, unused-ignore]  # here: only this process needs it

        seeded_model().save_pretrained(self._folder)
        tempfile.tempdir = self._folder  # vLLM leaves a file in it if its process is killed
        self._engine = vllm.LLM(
            self._folder,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_CONTEXT,
            max_num_seqs=MAX_BATCH,
            kv_cache_memory_bytes=256 << 20,
            logprobs_mode="processed_logprobs",
        ).llm_engine
        self._sampling = vllm.SamplingParams
        self._made = 0
        return f"vllm {vllm.__version__}"

    def _serve(self, arriving: _Arriving) -> None:
        engine = self._engine
        while engine.has_unfinished_requests() or arriving.left:
            for arrival in arriving.arrived(wait=not engine.has_unfinished_requests()):
                self._made += 1
                sampling = self._sampling(
                    temperature=1.0,
                    max_tokens=arrival.new_tokens,
                    ignore_eos=True,
                    logprobs=0,
                    detokenize=False,
                )
                engine.add_request(str(self._made), {"prompt_token_ids": list(arrival.prompt)}, sampling)
            engine.step()


CONTENDERS: dict[str, type[Contender]] = {"embedded": Embedded, "generate": Generate, "vllm": Vllm}
