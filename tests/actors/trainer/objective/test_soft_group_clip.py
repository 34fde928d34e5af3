"""SA-GCPO's gate: its gradient by hand, and the advantages that it takes away."""

import math

import pytest
import torch

from flexmarl.actors.trainer.objective.losses.soft_group_clip import soft_group_clipped_loss

torch.set_num_threads(1)
NUMBERS = {"tau_positive": 2.0, "tau_negative": 5.0, "target": 0.5}


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.25, 1.0, 1.75])
def test_the_gradient_is_the_ratios_times_the_gates_slope(advantage: float, ratio: float) -> None:
    old = torch.tensor([-1.0], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    losses = soft_group_clipped_loss(
        logprobs, old, torch.tensor([advantage]), torch.tensor([1.0]), torch.tensor([1]), **NUMBERS
    )
    (gradient,) = torch.autograd.grad(losses.values.sum(), logprobs)
    tau = 2.0 if advantage > 0 else 5.0
    p = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert losses.values.item() == pytest.approx(-4 / tau * p * advantage)
    assert gradient.item() == pytest.approx(-advantage * ratio * 4 * p * (1 - p))
    assert losses.held_back.item() == (4 * p * (1 - p) < 0.5)
    if ratio == 1.0:
        assert gradient.item() == pytest.approx(-advantage), "as without a clip"


def test_the_best_of_a_bad_group_is_not_made_more_probable_and_the_others_less() -> None:
    logprobs = torch.zeros(3, requires_grad=True)
    losses = soft_group_clipped_loss(
        logprobs,
        torch.zeros(3),
        torch.tensor([1.0, -1.0, 1.0]),
        torch.tensor([0.4, 0.1, 0.5]),
        torch.tensor([1, 1, 1]),
        **NUMBERS,
    )
    (gradient,) = torch.autograd.grad(losses.values.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([0.0, 1.0, -1.0])
    assert losses.held_back.tolist() == [True, False, False]
