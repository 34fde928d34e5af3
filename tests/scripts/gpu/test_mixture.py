"""T14 with a tiny mixture of experts."""

from typing import Any

import pytest
import torch

from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.weights_proof import PROBE_BOUNDS
from scripts.gpu import mixture
from scripts.gpu.checks import Card
from scripts.gpu.engine_agreement import engine_of
from scripts.gpu.mixture import CPU_LOAD, CPU_REQUESTS, compare_probes, measure_memory, run
from scripts.gpu.models import TINY_MIXTURE


def test_memory_and_numbers_of_a_mixture(card: Card) -> None:
    checks = {check.name: check for check in run(card)}
    assert not [check for check in checks.values() if check.passed is False]
    for name in ("all activations", "checkpointing"):
        ratio = checks[f"{name}: beyond the state, over the plan's"].value
        assert isinstance(ratio, float) and 0.75 <= ratio <= 1.1
        assert checks[f"{name}: peak over the plan's"].passed
    assert checks["probes: compared"].value == 16 * 8
    assert checks["probes: greatest difference (probe_max)"].passed
    assert checks["probes: other choices of experts, of the layer with the most"].passed
    assert checks["bfloat16: mean of |ratio - 1|"].passed


def test_memory_beyond_the_plan_is_seen(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "_MOST_OVER_PLAN", 0.5)
    checks = measure_memory(card, TINY_MIXTURE, CPU_LOAD, checkpointing=False)
    assert [check.name for check in checks if check.passed is False] == [
        "all activations: peak over the plan's"
    ]


def test_experts_that_were_lost_are_seen(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*arguments: Any) -> TransformersEngine:
        engine = engine_of(*arguments)
        with torch.no_grad():
            for name, tensor in engine.weights().items():
                if "experts" in name:
                    tensor.zero_()
        return engine

    monkeypatch.setattr(mixture, "engine_of", lose)
    *_, check, _ = compare_probes(card, TINY_MIXTURE, CPU_REQUESTS)
    assert check.passed is False and isinstance(check.value, float) and check.value > PROBE_BOUNDS["bfloat16"]
