"""The division of a step into updates, and samples on their way."""

import random

import numpy as np
import pytest

from flexmarl.actors.trainer.backends.torch_policy.forward_batches import TrainedSample
from flexmarl.actors.trainer.backends.torch_policy.held_samples import (
    HeldSample,
    count_tokens,
    divide_updates,
    update_of,
)

from .policies import make_samples

ROWS = [TrainedSample(sample, sample.advantage) for sample in make_samples(1, groups=7, group_size=3)]


@pytest.mark.parametrize("updates", [1, 2, 3, 4, 9])
def test_an_update_has_whole_groups_in_one_order_whichever_came_first(updates: int) -> None:
    parts = divide_updates(ROWS, updates)
    assert len(parts) == updates
    assert sum(map(count_tokens, parts)) == count_tokens(ROWS)
    groups = [{row.sample.group for row in part} for part in parts]
    assert sum(map(len, groups)) == len(set().union(*groups)) == 7
    for number, part in enumerate(parts):
        assert {update_of(row.sample, updates) for row in part} <= {number}
    for seed in range(5):
        assert divide_updates(random.Random(seed).sample(ROWS, len(ROWS)), updates) == parts


@pytest.mark.parametrize("has_critic", [False, True])
def test_a_held_sample_comes_back_as_it_was(has_critic: bool) -> None:
    row = ROWS[0]
    figures = np.linspace(-3, 0, len(row.sample.tokens), dtype=np.float32)
    held = HeldSample.of(
        TrainedSample(
            row.sample, figures + 1 if has_critic else 0.5, figures, figures + 2 if has_critic else None
        )
    )
    back = held.trained(0.5)
    assert back.sample is row.sample
    assert np.array_equal(back.advantage, figures + 1 if has_critic else 0.5)
    assert back.old_logprobs is not None and np.array_equal(back.old_logprobs, figures)
    assert (back.returns is not None) == has_critic
    assert back.returns is None or np.array_equal(back.returns, figures + 2)
    assert isinstance(row.advantage, float)
    assert HeldSample.of(row).trained(row.advantage) == row
