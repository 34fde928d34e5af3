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
    plain = make_policy()
    torch.autograd.backward(reference_loss(plain, samples))
    for packing, forwards in ((False, 2), (True, 1)):
        policy = make_policy(trainer=TorchTrainerConfig(packing=packing))
        assert len(policy._gradients.chunks(checked(policy, samples))) == forwards
        policy.accumulate(samples)
        assert relative_error(gradient(policy), gradient(plain)) < 1e-5


def test_the_share_of_padding_is_that_of_all_forwards() -> None:
    policy, samples = make_policy(trainer=TorchTrainerConfig(packing=False)), make_samples(2)
    samples = [samples[0], samples[1], samples[0]]
    rows = [replace_tokens(each, (1,) * size) for each, size in zip(samples, (8, 4, 2), strict=True)]
    inputs = [len(row.prompt_tokens) + len(row.tokens) - 1 for row in rows]
    for micro_batch in (rows[:2], rows[2:]):
        policy.accumulate(micro_batch)
    share = 1 - sum(inputs) / (2 * max(inputs[:2]) + inputs[2])
    assert 0.0 < share == pytest.approx(policy.optimizer_step().figures["padding_share"])
    assert "padding_share" not in policy.optimizer_step().figures


@pytest.mark.parametrize("packing", [False, True])
def test_a_bound_on_the_tokens_of_a_forward_leaves_the_gradient_as_it_is(packing: bool) -> None:
    samples = make_samples(2, groups=2, group_size=16)
    trainer = TorchTrainerConfig(packing=packing)
    whole = make_policy(trainer=trainer)
    bounded = make_policy(trainer=trainer.model_copy(update={"tokens_per_forward": 40}))
    assert len(whole._gradients.chunks(checked(whole, samples))) == 1
    whole.accumulate(samples)
    forwards = [
        chunk.rows.input_ids.numel() for chunk in bounded._gradients.chunks(checked(bounded, samples))
    ]
    assert len(forwards) > 4 and max(forwards) <= 40
    bounded.accumulate(samples)
    assert relative_error(gradient(bounded), gradient(whole)) < 1e-5
