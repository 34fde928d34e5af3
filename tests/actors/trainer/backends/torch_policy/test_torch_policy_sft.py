"""The SFT of one policy on one rank."""

import math

import pytest
import structlog
import torch

from .policies import EXAMPLES, gradient, make_policy, make_samples


def test_sft_reduces_the_loss_and_leaves_fresh_moments() -> None:
    policy = make_policy()
    losses = [policy.sft(EXAMPLES) for _ in range(20)]
    assert losses[0] == pytest.approx(math.log(16), abs=0.5)
    assert losses[-1] < 0.5 * losses[0]
    with pytest.raises(RuntimeError, match="sft_done"):
        policy.accumulate(make_samples(12))
    with structlog.testing.capture_logs() as logs:
        policy.sft_done()
    assert [(entry["batches"], entry["loss"]) for entry in logs] == [(20, losses[-1])]
    assert policy.version == 0
    assert not any(tensor.any() for state in policy._optimizer.state.values() for tensor in state.values())
    assert not gradient(policy).any()
    assert policy.accumulate(make_samples(12)).trained_samples > 0


def test_the_sft_loss_is_the_mean_over_completion_tokens() -> None:
    policy, plain = make_policy(), make_policy()
    examples = [((1, 2, 3), (4,)), ((5,), (6, 7, 8))]
    losses = []
    for prompt, completion in examples:
        logits = plain.model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(completion), reduction="sum"))
    assert policy.sft(examples) == pytest.approx(sum(loss.item() for loss in losses) / 4, rel=1e-5)


def test_sft_after_reinforcement_learning_has_begun_is_refused() -> None:
    policy = make_policy()
    policy.accumulate(make_samples(13))
    with pytest.raises(RuntimeError, match="solver"):
        policy.sft(EXAMPLES)
