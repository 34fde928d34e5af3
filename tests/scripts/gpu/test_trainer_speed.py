"""T5 with a tiny model: the gradient, the grid, and the rate of operations that the shares are made of."""

from dataclasses import replace
from typing import Any

import pytest

from scripts.gpu import trainer_speed
from scripts.gpu.checks import Card
from scripts.gpu.models import HALF_BILLION, MIXTURE, SEVEN_BILLION, TINY, TINY_MIXTURE, Shape, peak_flops
from scripts.gpu.trainer_speed import GRID, Load, compare_gradients, measure_grid


def test_the_gradient_is_that_of_float64() -> None:
    assert [check.passed for check in compare_gradients("cpu")] == [True, True]


def test_each_variant_is_measured(card: Card) -> None:
    checks = list(measure_grid(card, TINY, Load(2, 4, 4, 8)))
    assert [check.name for check in checks] == [f"{variant.name}: tokens/s" for variant in GRID]
    assert all(isinstance(check.value, float) and check.value > 0 for check in checks)


def test_a_variant_that_fails_does_not_hide_the_others(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_, last = GRID
    wrong: Any = {"name": "wrong", "dtype": "float8"}
    monkeypatch.setattr(trainer_speed, "GRID", (first, replace(first, **wrong), last))
    checks = list(measure_grid(card, TINY, Load(2, 4, 4, 8)))
    assert [(check.name, check.passed) for check in checks] == [
        (f"{first.name}: tokens/s", None), ("wrong: ended", False), (f"{last.name}: tokens/s", None),
    ]  # fmt: skip
    assert "dtype" in str(checks[1].value)


@pytest.mark.parametrize("shape", [TINY, HALF_BILLION.with_layers(1), SEVEN_BILLION, TINY_MIXTURE, MIXTURE])
def test_the_parameters_of_a_shape_are_those_of_its_model(shape: Shape) -> None:
    from flexmarl.actors.pretrained import named_weights_of
    from scripts.gpu.models import model_of

    weights = named_weights_of(model_of(shape, "cpu", "float32"))
    assert sum(tensor.numel() for tensor in weights.values()) == shape.parameters


def test_operations_are_counted_as_six_for_each_weight_and_token_without_attention() -> None:
    shape = Shape(1024, 4096, 8, 16, 16, 1000, tied=False)
    weights = shape.layers * shape.layer_parameters + shape.embedding_parameters
    assert shape.training_flops(1, 15) == pytest.approx(6 * weights * 15, rel=0.01)


def test_the_peak_rate_is_that_of_the_longest_name() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA L40") == 181e12 and peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("NVIDIA A10G") == 70e12 and peak_flops("Quadro") is None
