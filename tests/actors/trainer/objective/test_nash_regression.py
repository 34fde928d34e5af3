"""MNPO: its gradient by hand, and that the squares of single answers are those of the paper's pairs."""

from itertools import combinations

import pytest
import torch

from flexmarl.actors.credit.win_rate import WinRate
from flexmarl.actors.trainer.objective.losses.nash_regression import nash_regression_loss

torch.set_num_threads(1)


@pytest.mark.parametrize("eta", [0.5, 2.0])
def test_the_gradient_of_a_token_is_eta_h_less_the_win_rate(eta: float) -> None:
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    logprobs = (old + torch.tensor([0.1, 0.2, -0.4])).requires_grad_()
    advantages, lengths = torch.tensor([0.5, 0.5, -0.5]), torch.tensor([2, 1])
    losses = nash_regression_loss(logprobs, old, advantages, lengths, eta=eta)
    (gradient,) = torch.autograd.grad(losses.values.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([eta * 0.3 - 0.5] * 2 + [eta * -0.4 + 0.5])
    assert losses.values.tolist() == pytest.approx(
        [eta / 4 * (0.3 - 0.5 / eta) ** 2] * 2 + [eta / 2 * (-0.4 + 0.5 / eta) ** 2]
    )
    assert not losses.held_back.any() and losses.ratio.tolist() == pytest.approx(
        torch.tensor([0.1, 0.2, -0.4]).exp().tolist()
    )


def test_all_pairs_of_a_group_have_the_gradient_of_its_answers_less_their_mean() -> None:
    """Eq. 15 over all pairs of four answers, in float64, with the win rates' differences as margins: the gradient by a
    log-ratio is that of this loss, times the size of the group, less the mean over the group."""
    eta, rewards = 0.7, [3.0, 1.0, 1.0, 0.0]
    wins = torch.tensor(WinRate()(rewards), dtype=torch.float64)
    ratios = torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=torch.float64, requires_grad=True)
    pairs = torch.stack(
        [
            0.5 * eta * ((ratios[i] - ratios[j]) - (wins[i] - wins[j]) / eta) ** 2
            for i, j in combinations(range(4), 2)
        ]
    ).sum()
    (of_pairs,) = torch.autograd.grad(pairs, ratios)
    single = nash_regression_loss(
        ratios, torch.zeros(4, dtype=torch.float64), wins, torch.ones(4, dtype=torch.int64), eta=eta
    )
    (of_single,) = torch.autograd.grad(single.values.sum(), ratios)
    assert of_pairs.tolist() == pytest.approx((4 * (of_single - of_single.mean())).tolist(), abs=1e-12)


def test_the_minimum_is_the_paper_s_update() -> None:
    """Eq. 11: the new policy is the opponents' times the exponential of the win rate over eta."""
    wins, eta = torch.tensor([0.5, -0.5], dtype=torch.float64), 2.0
    old = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    losses = nash_regression_loss(old + wins / eta, old, wins, torch.tensor([1, 1]), eta=eta)
    assert losses.values.tolist() == pytest.approx([0.0, 0.0])
