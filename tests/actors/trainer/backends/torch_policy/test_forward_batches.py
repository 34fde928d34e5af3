"""The forwards of one policy on one rank: their bounds leave the gradient as it is."""

import random
from collections.abc import Sequence

import pytest
import torch

from flexmarl.actors.messages import Sample
from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig
from flexmarl.actors.trainer.backends.torch_policy.checked_samples import checked_samples
from flexmarl.actors.trainer.backends.torch_policy.forward_batches import TrainedSample
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.objective.role_baselines import RoleBaselines

from .policies import gradient, make_policy, make_samples, reference_loss, relative_error, replace_tokens


def checked(policy: TorchPolicy, samples: Sequence[Sample]) -> list[TrainedSample]:
    return checked_samples(samples, policy.name, policy._setup, policy.version, RoleBaselines())


def test_long_and_short_rows_in_one_batch_give_the_same_gradient() -> None:
    """Uneven enough that the batch is computed in several forwards."""
    rng = random.Random(0)
    samples = make_samples(2, groups=2, group_size=16)
    long = tuple(rng.randrange(16) for _ in range(60))
    samples[0] = replace_tokens(samples[0], long)
    policy, plain = make_policy(), make_policy()
    assert len(policy._chunks(checked(policy, samples))) == 2
    policy.accumulate(samples)
    torch.autograd.backward(reference_loss(plain, samples))
    assert relative_error(gradient(policy), gradient(plain)) < 1e-5


def test_the_share_of_padding_is_that_of_all_forwards() -> None:
    policy, samples = make_policy(), make_samples(2)
    samples = [samples[0], samples[1], samples[0]]
    rows = [replace_tokens(each, (1,) * size) for each, size in zip(samples, (8, 4, 2), strict=True)]
    inputs = [len(row.prompt_tokens) + len(row.tokens) - 1 for row in rows]
    for micro_batch in (rows[:2], rows[2:]):
        policy.accumulate(micro_batch)
    share = 1 - sum(inputs) / (2 * max(inputs[:2]) + inputs[2])
    assert 0.0 < share == pytest.approx(policy.optimizer_step().figures["padding_share"])
    assert "padding_share" not in policy.optimizer_step().figures


def test_a_bound_on_the_tokens_of_a_forward_leaves_the_gradient_as_it_is() -> None:
    samples = make_samples(2, groups=2, group_size=16)
    whole, bounded = make_policy(), make_policy()
    assert len(whole._chunks(checked(whole, samples))) == 1
    whole.accumulate(samples)
    trainer = TorchTrainerConfig(tokens_per_forward=40)
    bounded._setup = bounded._setup.model_copy(update={"trainer": trainer})
    forwards = [chunk.rows.input_ids.numel() for chunk in bounded._chunks(checked(bounded, samples))]
    assert len(forwards) > 4 and max(forwards) <= 40
    bounded.accumulate(samples)
    assert relative_error(gradient(bounded), gradient(whole)) < 1e-5
