"""T6 with a tiny model."""

import pytest
import torch

from scripts.gpu import layer_speed
from scripts.gpu.checks import Card
from scripts.gpu.filled_policies import filled_policy
from scripts.gpu.layer_speed import Costs, Load, measure_layers, run
from scripts.gpu.models import TINY, Shape, setup_of


def test_both_settings_are_measured(card: Card) -> None:
    checks = list(run(card))
    assert {check.name.partition(":")[0] for check in checks} == {"checkpointing", "all kept"}
    assert not [check for check in checks if check.passed is False]


def test_a_layer_is_the_difference_of_two_models(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(_card: Card, shape: Shape, _load: Load, _checkpointing: bool) -> Costs:
        layers = shape.layers
        return Costs(
            forward_s=0.5 + 0.1 * layers, both_s=1.5 + 0.3 * layers, batch_s=4.0, kept=0, peak=0, step_s=1.0
        )

    monkeypatch.setattr(layer_speed, "_measure", measure)
    shape = TINY.with_layers(28)
    checks = list(measure_layers(card, shape, (1, 4), Load(2, 4, 12, 3), False, []))
    values = [check.value for check in checks]
    assert values[:4] == pytest.approx([100, 200, 500, 1000])
    assert values[4] == pytest.approx(1e12 / shape.with_layers(4).parameters)
    assert values[5] == pytest.approx(2 * 16 * 3 / 4.0)


def test_weights_are_drawn_as_those_of_a_new_model() -> None:
    first, again = (filled_policy(setup_of(TINY, "cpu", "float32")) for _ in range(2))
    weights = {name: tensor.detach() for name, tensor in first.model.named_parameters()}
    matrices = [tensor for tensor in weights.values() if tensor.dim() > 1]
    assert all(float(matrix.std()) == pytest.approx(0.02, rel=0.1) for matrix in matrices)
    assert not torch.equal(
        weights["model.layers.0.mlp.up_proj.weight"], weights["model.layers.1.mlp.up_proj.weight"]
    )
    assert all(
        (tensor == float(name.endswith("norm.weight"))).all()
        for name, tensor in weights.items()
        if tensor.dim() < 2
    )
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.model.named_parameters())
