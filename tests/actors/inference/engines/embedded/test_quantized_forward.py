"""The embedded engine with linear layers in eight bits."""

from typing import Any

import pytest
import torch
from torch import nn

from flexmarl.actors.errors import UnsupportedModel
from flexmarl.actors.inference.engines.embedded.llama_forward import Linear
from flexmarl.actors.inference.engines.embedded.quantized_forward import QuantizedForward, QuantizedLinear
from flexmarl.actors.inference.engines.engine import EngineRequest
from flexmarl.actors.inference.inference_config import EmbeddedEngineConfig

from ..transformers_engines import drain, make_engine, make_model


def answers(engine: Any, length: int, count: int = 6) -> dict[str, tuple[int, ...]]:
    for number in range(count):
        engine.add(EngineRequest(f"r{number}", (1, 2, 3, number + 4), number, 1.0, length))
    return {name: result.tokens for name, result in drain(engine).items()}


def rounded(x: torch.Tensor, steps: int, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """``x`` on a grid of ``steps`` equal parts from ``low`` to ``high``, of which zero is a point."""
    scale = (high - low) / steps
    return (x / scale).round() * scale


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_the_formula_in_float64(bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(24, 40), torch.randn(5, 40)
    shift = torch.randn(24) if bias else None
    computed = QuantizedLinear(Linear(weight.t(), shift))(x)
    largest = weight.double().abs().amax(1, keepdim=True)
    inputs = rounded(x.double(), 127, x.double().min(), x.double().max())
    expected = inputs @ rounded(weight.double(), 254, -largest, largest).t()
    expected += 0 if shift is None else shift.double()
    # The grid of the inputs may be moved by a part of a step, so that zero is on it.
    step = float(x.max() - x.min()) / 127
    assert torch.allclose(computed.double(), expected, atol=step * float(weight.abs().sum(1).max()) / 4)
    exact = nn.functional.linear(x, weight, shift)
    assert 0 < float((computed - exact).abs().max()) < 0.1 * float(exact.abs().max())


def test_an_outlier_of_one_row_costs_the_others_nothing() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 16), torch.randn(3, 16)
    plain = QuantizedLinear(Linear(weight.t(), None))(x)
    weight[0, 0] = 1e4
    assert torch.equal(QuantizedLinear(Linear(weight.t(), None))(x)[:, 1:], plain[:, 1:])


def test_a_layer_of_zeros_and_the_addition_to_a_residual() -> None:
    linear = QuantizedLinear(Linear(torch.zeros(16, 8), None))
    residual = torch.ones(3, 8)
    linear.add_to(residual, torch.randn(3, 16))
    assert torch.equal(residual, torch.ones(3, 8))


def test_answers_change_with_the_weights_that_are_loaded_and_not_before() -> None:
    engine = make_engine(quantized=True)
    first = answers(engine, 12)
    others = make_model(seed=1).state_dict()
    with torch.no_grad():
        for name, tensor in engine.weights().items():
            tensor.copy_(others[name])
    engine.weights_loaded(engine.weights())
    second = answers(engine, 12)
    assert first != second
    fresh = make_engine(seed=1, quantized=True)
    assert answers(fresh, 12) == second, "nothing of the former weights is left"


def test_most_of_the_draws_are_those_of_the_full_engine() -> None:
    """The same seeds: until a rounding decides a token, the answers are the same."""
    full, cheap = (
        answers(make_engine(max_batch=16), 8, 16),
        answers(make_engine(max_batch=16, quantized=True), 8, 16),
    )
    firsts = [full[name][0] == cheap[name][0] for name in full]
    assert sum(firsts) >= 12
    assert full != cheap


def test_models_that_can_not_be_quantised_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"engine\.quantization can't be had: .* llama family"):
        make_engine("gpt2", quantized=True)
    with pytest.raises(UnsupportedModel, match="only float32 on a CPU is quantised"):
        QuantizedForward(make_model().bfloat16(), 32)


def test_it_is_for_cpus_and_proves_no_weights() -> None:
    options = EmbeddedEngineConfig(quantization="int8")
    assert options.unavailable("cpu") is None and options.probe_bound("float32") is None
    assert "there the engine vllm quantises" in str(options.unavailable("cuda"))
    assert EmbeddedEngineConfig().unavailable("cuda") is None
