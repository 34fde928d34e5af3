"""Policies on ranks: their setups, and comparisons of what they compute."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flexmarl.actors.messages import LoraConfig, StepStats

from ...users_losses import CLIPPED
from .ranks import (
    gang_setup,
)

ALGORITHMS: dict[str, dict[str, Any]] = {
    "dapo": {"name": "dapo"},
    "reference": {"name": "grpo", "kl_coefficient": 0.1},
    "critic": {"name": "ppo", "kl_coefficient": 0.1},
    "held": {"name": "reinforce_pp", "kl_coefficient": 0.1},
    "entropy": {"name": "dapo", "entropy_coefficient": 0.1},
    "users loss": {"name": "dapo", "loss": CLIPPED, "entropy_coefficient": 0.1},
}
SETUPS = {name: gang_setup(algorithm) for name, algorithm in ALGORITHMS.items()} | {
    "updates": gang_setup({"name": "dapo", "kl_coefficient": 0.1}, updates=2),
    "updates of a users loss": gang_setup({"name": "dapo", "loss": CLIPPED}, updates=2),
    "updates of a critic": gang_setup({"name": "ppo", "kl_coefficient": 0.1}, updates=2),
    "updates of held": gang_setup({"name": "reinforce_pp"}, updates=2),
    "tied": gang_setup({"name": "dapo"}, tie_word_embeddings=True),
    "deep": gang_setup({"name": "dapo"}, num_hidden_layers=2, hidden_size=48),
    "recomputed": gang_setup(
        {"name": "ppo"}, num_hidden_layers=2, trainer={"name": "torch", "activation_checkpointing": True}
    ),
    "adapter": gang_setup(
        {"name": "ppo", "kl_coefficient": 0.1}, lora=LoraConfig(rank=3, alpha=7), num_hidden_layers=2
    ),
    "published adapter": gang_setup(
        {"name": "dapo"},
        lora=LoraConfig(rank=1, alpha=2, targets=("q_proj", "down_proj")),
        publishes_adapter=True,
        tie_word_embeddings=True,
    ),
}


def error(found: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]]) -> float:
    """The largest relative difference of a tensor."""
    assert found.keys() == expected.keys()
    return max(
        float(np.linalg.norm(found[name] - expected[name]) / max(1e-9, float(np.linalg.norm(expected[name]))))
        for name in expected
    )


def same_stats(found: StepStats, expected: StepStats, tolerance: float = 1e-5) -> None:
    assert (found.samples, found.tokens) == (expected.samples, expected.tokens)
    assert found.by_agent == expected.by_agent
    measured, reference = (dict(stats.figures) for stats in (found, expected))
    for figures in (measured, reference):
        figures.pop("padding_share", None)  # each rank has its own forwards
    assert measured == pytest.approx(reference, rel=tolerance, abs=tolerance)
