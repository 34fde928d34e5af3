"""Compiled layers and log-probabilities give the same numbers, and a machine without a compiler trains."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer import padding
from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig
from flexmarl.actors.trainer.backends.torch_policy import compiled, completion_model
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.objective.loss import token_logprobs
from flexmarl.actors.trainer.trainer_config import LossConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from .policies import SMALLER_MODEL, make_samples

# Dynamo looks at ``.grad`` of the tensors that it traces, and torch warns of that; and of some versions of Python.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traces and differentiates as on a GPU, and runs torch's operations in place of kernels: C++ takes minutes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # The tests of vLLM set this variable, also if they are left out.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    compiled._compile_token_logprobs.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(disable=False):
        yield
    torch._dynamo.reset()
    compiled._compile_token_logprobs.cache_clear()


def gradients(dtype: str = "float32", **settings: Any) -> dict[str, torch.Tensor]:
    """Returns the gradient of two micro-batches of different lengths."""
    trainer = TorchTrainerConfig(tokens_per_forward=48, **settings)
    setup = PolicySetup(
        model=ModelConfig(config=SMALLER_MODEL | {"num_hidden_layers": 2}, tokenizer="unused", dtype=dtype),
        credit={AgentName("solver"): CreditConfig()},
        loss=LossConfig(name="dapo"),
        trainer=trainer,
    )
    policy = TorchPolicy(PolicyName("solver"), setup, seed=0, total_steps=10)
    samples = make_samples(0)
    policy.accumulate(samples[:3])
    policy.accumulate(samples[3:])
    return {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}


@pytest.mark.parametrize(
    ("checkpointing", "dtype", "bound"), [(False, "float32", 1e-4), (True, "bfloat16", 0.02)]
)
def test_the_gradient_is_that_of_the_model_as_it_is_written(
    checkpointing: bool, dtype: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(dtype, compilation=False)
    monkeypatch.setattr(compiled, "can_compile", lambda device: True)
    # A custom operation for CPUs, which can't be compiled with its sizes left open.
    monkeypatch.setattr(completion_model, "use_onednn", lambda model: model)
    counters = torch._dynamo.utils.counters
    counters.clear()
    actual = gradients(dtype, compilation=True, activation_checkpointing=checkpointing)
    assert counters["stats"]["unique_graphs"] >= 2
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= bound * gradient.norm(), name


def make_rows(*lengths: int) -> list[Sample]:
    """A sample of each length, a third of it prompt."""
    sample = make_samples(0)[0]
    return [
        replace(
            sample,
            sample_id=f"q_0_{number}",
            prompt_tokens=tuple((number + place) % 16 for place in range(length // 3)),
            tokens=tuple(place % 16 for place in range(length - length // 3)),
            logprobs=(-2.5,) * (length - length // 3),
        )
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(("packing", "checkpointing"), [(False, False), (True, True)])
def test_micro_batches_of_any_lengths_are_compiled_once(
    packing: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row or many, as long or not, in one group for attention or in several, with logits in one chunk or more."""
    monkeypatch.setattr(compiled, "can_compile", lambda device: True)
    monkeypatch.setattr(completion_model, "use_onednn", lambda model: model)
    monkeypatch.setattr(completion_model, "most_logits_bytes", lambda device: 4 * 16 * 40)
    monkeypatch.setattr(padding, "WORTH_DIVIDING_TOKENS", 8)
    trainer = TorchTrainerConfig(
        tokens_per_forward=96, compilation=True, packing=packing, activation_checkpointing=checkpointing
    )
    model = ModelConfig(config=SMALLER_MODEL, tokenizer="unused", dtype="bfloat16")
    setup = PolicySetup(
        model=model,
        credit={AgentName("solver"): CreditConfig()},
        loss=LossConfig(name="dapo"),
        trainer=trainer,
    )
    policy = TorchPolicy(PolicyName("solver"), setup, seed=0, total_steps=10)
    policy.accumulate(make_rows(24, 24, 24, 24))
    if not packing:  # a batch of one row is a variant, but one row that has all samples is not
        policy.accumulate(make_rows(12))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs >= 2
    for lengths in [
        (8, 8),
        (11, 11, 11),
        (6, 7),
        (5, 9, 29),
        (12,),
        (32, 31, 30),
        (4, 4, 28, 28),
        (30, 3, 17, 8),
    ]:
        policy.accumulate(make_rows(*lengths))
    policy.accumulate(make_rows(*range(4, 32)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([0.5, 1.0, 2.0])])
def test_log_probabilities_are_the_same_at_any_temperature(temperature: float | torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 50, generator=generator)
    tokens = torch.tensor([0, 7, 49])
    expected = token_logprobs(logits, tokens, temperature)
    torch.testing.assert_close(compiled.compiled_token_logprobs(logits, tokens, temperature), expected)


def test_a_cpu_compiles_nothing() -> None:
    assert not compiled.is_compiled(True, torch.nn.Linear(2, 2), torch.device("cpu"))


def test_by_default_a_model_is_compiled_from_a_hundred_million_parameters_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "can_compile", lambda device: True)
    small, large = (torch.nn.Linear(10_000, width, bias=False, device="meta") for width in (9_999, 10_000))
    assert [compiled.is_compiled(None, model, CUDA) for model in (small, large)] == [False, True]
    assert compiled.is_compiled(True, small, CUDA) and not compiled.is_compiled(False, large, CUDA)


def test_without_a_compiler_a_gpu_trains_slower_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(function: Any) -> Any:
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr(compiled, "compile_function", fail)
    compiled.can_compile.cache_clear()
    try:
        with capture_logs() as logs:
            assert not any(compiled.can_compile(CUDA) for _ in range(2))
    finally:
        compiled.can_compile.cache_clear()
    assert [entry["error"] for entry in logs] == ["Failed to find C compiler"]
