"""Small models that vLLM can run on a CPU, their trainer's side, and requests for them."""

from typing import Any

import pytest
import torch

from flexmarl.actors.inference.engines.engine import Engine, EngineRequest, EngineResult
from flexmarl.actors.inference.inference_config import VllmEngineConfig
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import outline_of
from flexmarl.actors.trainer.backends.torch_policy.completion_model import (
    CompletionModel,
    named_weights,
    placed_model,
)
from flexmarl.actors.trainer.padding import TokenRow, pad_rows
from flexmarl.transport.state import StateTransport

VOCABULARY = 48
asynchronous = pytest.mark.parametrize("scheduling", ["asynchronous"], indirect=True)
"""As on GPUs. Tests of weights alone have one of the two ways of scheduling."""
QWEN: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def model_of(*, tied: bool = False, tokenizer: str = "none", **changes: Any) -> ModelConfig:
    return ModelConfig(config=QWEN | {"tie_word_embeddings": tied} | changes, tokenizer=tokenizer)


OPTIONS = VllmEngineConfig(max_batch=4, kv_cache_bytes=2**24)


def made(model: ModelConfig, options: VllmEngineConfig = OPTIONS) -> Any:
    from flexmarl.actors.inference.engines.vllm_engine import VllmEngine

    return VllmEngine(outline_of(model), [], options)


def lend(engine: Any) -> Any:
    """Makes ``engine``, which tests share, as a new one: without requests and counts. ``close`` ends its requests,
    and not the engine: another one takes five seconds."""
    return _Loan(engine)


class _Loan:
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        engine._counted = type(engine._counted)()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        for name in [*self._engine._turns]:
            self._engine.abort(name)


class Learner:
    """A policy as its trainer has it: weights that are updated, and log-probabilities by them."""

    def __init__(self, model: ModelConfig, seed: int = 0) -> None:
        torch.set_num_threads(1)
        self._vocabulary: int = (model.config or {})["vocab_size"]
        self._completions = CompletionModel(model, placed_model(model, seed))
        self._completions.narrow()
        self._optimizer = torch.optim.AdamW(self._completions.model.parameters(), lr=3e-3)

    def weights(self) -> dict[str, torch.Tensor]:
        return named_weights(self._completions.model)

    def update(self, rows: list[TokenRow]) -> None:
        """Makes the completions more probable."""
        self._optimizer.zero_grad()
        loss = -self._completions.logprobs(pad_rows(rows, self._vocabulary)).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        self._optimizer.step()

    @torch.no_grad()
    def logprobs(
        self, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float = 1.0
    ) -> list[float]:
        rows = pad_rows([(prompt, tokens)], self._vocabulary)
        found: list[float] = self._completions.logprobs(rows, temperature or 1.0).tolist()
        return found


def request_of(
    name: str, prompt: tuple[int, ...] = (2, 3, 4), *, seed: int = 0, temperature: float = 1.0, new: int = 24
) -> EngineRequest:
    return EngineRequest(name, prompt, seed, temperature, new)


def far_apart(learner: Learner, request: EngineRequest, result: EngineResult) -> float:
    """The greatest difference, in nats, between the result's log-probabilities and the trainer's."""
    expected = learner.logprobs(request.prompt_tokens, result.tokens, request.temperature)
    return max(abs(a - b) for a, b in zip(expected, result.logprobs, strict=True))


async def load(engine: Engine, learner: Learner, transport: StateTransport, version: int) -> None:
    await engine.load(await transport.set("solver", learner.weights(), version=version), transport)
