"""The forwards of one policy on one rank: their bounds leave the gradient as it is."""

import functools
import random

import pytest
import torch

from flexmarl.actors.trainer.backends.torch_policy import forward_batches
from flexmarl.actors.trainer.padding import split_by_length

from .policies import gradient, make_policy, make_samples, reference_loss, relative_error, replace_tokens


def test_long_and_short_rows_in_one_batch_give_the_same_gradient() -> None:
    """Uneven enough that the batch is computed in several forwards."""
    rng = random.Random(0)
    samples = make_samples(2, groups=2, group_size=16)
    long = tuple(rng.randrange(16) for _ in range(60))
    samples[0] = replace_tokens(samples[0], long)
    policy, plain = make_policy(), make_policy()
    assert len(policy._chunks(policy._checked(samples))) == 2
    policy.accumulate(samples)
    torch.autograd.backward(reference_loss(plain, samples))
    assert relative_error(gradient(policy), gradient(plain)) < 1e-5


def test_a_bound_on_the_tokens_of_a_forward_leaves_the_gradient_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = make_samples(2, groups=2, group_size=16)
    whole, bounded = make_policy(), make_policy()
    assert len(whole._chunks(whole._checked(samples))) == 1
    whole.accumulate(samples)
    monkeypatch.setattr(
        forward_batches, "split_by_length", functools.partial(split_by_length, most_tokens=40)
    )
    forwards = [chunk.rows.input_ids.numel() for chunk in bounded._chunks(bounded._checked(samples))]
    assert len(forwards) > 4 and max(forwards) <= 40
    bounded.accumulate(samples)
    assert relative_error(gradient(bounded), gradient(whole)) < 1e-5
