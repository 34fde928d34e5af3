"""ECHO's clip against its formula in loops, and a range worked out by hand."""

import math
import random
from functools import partial
from statistics import fmean

import pytest
import torch

from flexmarl.actors.trainer.objective.losses.confidence_clip import confidence_clipped_loss, tail_means

torch.set_num_threads(1)
ADAPTED = partial(confidence_clipped_loss, least=0.05, greatest=0.2, kappa=4.0, tail=3)


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_formula_token_by_token(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 8) for _ in range(5)]
    olds = [[-rng.expovariate(3.0) for _ in range(length)] for length in lengths]
    moves = [[rng.uniform(-0.3, 0.3) for _ in range(length)] for length in lengths]
    advantages = [[rng.uniform(-2, 2)] * length for length in lengths]
    flat = [old for sequence in olds for old in sequence]
    old = torch.tensor(flat, dtype=torch.float64)
    logprobs = (
        old + torch.tensor([move for each in moves for move in each], dtype=torch.float64)
    ).requires_grad_()
    advantage = torch.tensor([a for each in advantages for a in each], dtype=torch.float64)
    losses = ADAPTED(logprobs, old, advantage, torch.tensor(lengths))
    (gradient,) = torch.autograd.grad(losses.values.sum(), logprobs)
    values, slopes = [], []
    for of_old, of_move, of_advantage in zip(olds, moves, advantages, strict=True):
        for t, (move, a) in enumerate(zip(of_move, of_advantage, strict=True)):
            confidence = fmean(math.exp(value) for value in of_old[max(0, t - 2) : t + 1])
            eps = 0.05 + 0.15 / (1 + math.exp(-4.0 * (1 - confidence)))
            ratio = math.exp(move)
            clipped = min(max(ratio, 1 - eps), 1 + eps)
            values.append(-min(ratio * a, clipped * a))
            slopes.append(0.0 if clipped * a < ratio * a else -ratio * a)
    assert losses.values.tolist() == pytest.approx(values)
    assert gradient.tolist() == pytest.approx(slopes)
    assert losses.held_back.tolist() == [slope == 0.0 for slope in slopes]


def test_a_certain_token_has_a_narrower_range_than_an_unsure_one() -> None:
    """Both ratios are 1.15: eps is 0.05 + 0.15 / 2 = 0.125 at confidence 1, and 0.1973 at confidence 0."""
    old = torch.tensor([0.0, -40.0], dtype=torch.float64)
    logprobs = old + math.log(1.15)
    losses = ADAPTED(logprobs, old, torch.ones(2), torch.tensor([1, 1]))
    assert losses.held_back.tolist() == [True, False]
    assert losses.values.tolist() == pytest.approx([-1.125, -1.15])


def test_a_tail_does_not_reach_into_the_sequence_before() -> None:
    values = torch.tensor([1.0, 3.0, 5.0, 7.0, 100.0])
    assert tail_means(values, torch.tensor([4, 1]), 3).tolist() == pytest.approx([1, 2, 3, 5, 100])
