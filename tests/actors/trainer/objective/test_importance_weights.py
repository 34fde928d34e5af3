import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.trainer.objective.importance_weights import correction_weights
from flexmarl.actors.trainer.trainer_config import CORRECTION_BOUNDS, Correction

KINDS: tuple[Correction, ...] = ("none", "tis", "icepop", "decoupled")


def naive(kind: Correction, ratio: float, low: float | None, high: float | None) -> tuple[float, bool]:
    if kind == "none":
        return 1.0, False
    if kind == "tis":
        return (ratio if high is None else min(ratio, high)), high is not None and ratio > high
    outside = (low is not None and ratio < low) or (high is not None and ratio > high)
    return (0.0, True) if outside else (ratio, False)


@given(
    st.lists(st.tuples(st.floats(-8, 0), st.floats(-3, 3)), min_size=1, max_size=20), st.sampled_from(KINDS)
)
def test_against_plain_floats(tokens: list[tuple[float, float]], kind: Correction) -> None:
    engine = torch.tensor([t[0] for t in tokens], dtype=torch.float64)
    trainer = (engine + torch.tensor([t[1] for t in tokens], dtype=torch.float64)).requires_grad_()
    low, high = CORRECTION_BOUNDS[kind]
    weights, removed = correction_weights(trainer, engine, kind, low=low, high=high)
    gaps = (trainer.detach() - engine).tolist()
    expected = [naive(kind, math.exp(gap), low, high) for gap in gaps]
    assert weights.tolist() == pytest.approx([e[0] for e in expected], rel=1e-12)
    assert removed.tolist() == [e[1] for e in expected]
    assert not weights.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_where_engine_and_trainer_agree_nothing_is_corrected(kind: Correction) -> None:
    low, high = CORRECTION_BOUNDS[kind]
    logprobs = torch.tensor([-1.0, -7.0])
    weights, removed = correction_weights(logprobs, logprobs, kind, low=low, high=high)
    assert weights.tolist() == [1.0, 1.0] and not removed.any()


@pytest.mark.parametrize("kind", ["tis", "icepop", "decoupled"])
def test_extreme_ratios_have_a_bounded_weight(kind: Correction) -> None:
    low, high = CORRECTION_BOUNDS[kind]
    weights, _ = correction_weights(
        torch.tensor([0.0, -1e5]), torch.tensor([-1e5, 0.0]), kind, low=low, high=high
    )
    assert weights.isfinite().all() and weights.max() <= 2.0
