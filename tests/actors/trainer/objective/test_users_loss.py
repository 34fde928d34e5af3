"""A loss of the user's own: the same as an algorithm's by another way, and a sentence for each mistake."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.recipe.named_function import named_function
from flexmarl.actors.trainer.objective.loss_inputs import LossInputs
from flexmarl.actors.trainer.objective.objective import CompletionTokens, batch_loss
from flexmarl.actors.trainer.objective.users_loss import UsersLoss, loss_problems
from flexmarl.actors.trainer.trainer_config import LossConfig

from ..users_losses import CLIPPED, CLIPPED_SEQUENCE, users_loss

MODULE = CLIPPED.partition(":")[0]


def problems(name: str, loss: LossConfig | None = None) -> list[str]:
    function = named_function(Path(), f"{MODULE}:{name}")
    return list(loss_problems(function, UsersLoss(name, function, repr), loss or LossConfig()))


def made_batch() -> CompletionTokens:
    generator = torch.Generator().manual_seed(3)
    logprobs = -3 * torch.rand(9, generator=generator, dtype=torch.float64)
    return CompletionTokens(
        logprobs=logprobs.clone().requires_grad_(),
        engine_logprobs=logprobs + torch.rand(9, generator=generator, dtype=torch.float64) - 0.5,
        advantages=torch.tensor([1.0, -1.0, 0.5]).repeat_interleave(torch.tensor([2, 3, 4])),
        lengths=torch.tensor([2, 3, 4]),
        group_sizes=torch.tensor([3, 3, 3]),
        rewards=torch.tensor([1.0, 0.0, 0.5]),
        old_logprobs=logprobs + torch.rand(9, generator=generator, dtype=torch.float64) - 0.5,
    )


@pytest.mark.parametrize("old_policy", ["proximal", "behaviour"])
@pytest.mark.parametrize(("algorithm", "name"), [("dapo", CLIPPED), ("gspo", CLIPPED_SEQUENCE)])
def test_the_formula_of_an_algorithm_gives_its_loss_and_gradient(
    algorithm: str, name: str, old_policy: str
) -> None:
    config = LossConfig.model_validate({"name": algorithm, "old_policy": old_policy, "clip_low": 0.2})
    found, expected = made_batch(), made_batch()
    loss, sums = batch_loss(config, found, users_loss(name))
    reference, of_algorithm = batch_loss(config, expected)
    torch.autograd.backward([loss, reference])
    torch.testing.assert_close(loss, reference)
    assert found.logprobs.grad is not None and found.logprobs.grad.any()
    torch.testing.assert_close(found.logprobs.grad, expected.logprobs.grad)
    assert sums.keys() == of_algorithm.keys()


def test_a_right_loss_has_no_problems_with_any_inputs() -> None:
    every = LossConfig(kl_coefficient=0.1, entropy_coefficient=0.1)
    for name in ("clipped", "clipped_sequence"):
        assert problems(name) == problems(name, every) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "total",
            "returns a tensor [], not one loss for each of 7 tokens; it is added up behind the function",
        ),
        ("detached", "returns losses without a gradient: compute them from inputs.logprobs"),
        ("infinite", "returns losses that are infinite or not a number"),
        ("steep", "the gradient of the losses is infinite or not a number"),
        ("whole_numbers", "returns a tensor of torch.int64, not of floating numbers"),
        ("nothing", "returns NoneType, not a tensor of the losses of 7 tokens"),
        ("of_advantages", "the losses have no gradient by the log-probabilities"),
        ("over_the_batch", "the losses of a sequence are others if it is alone in the batch"),
        ("failing", "failed: AttributeError: 'LossInputs' object has no attribute 'nowhere'"),
        ("waiting", "it is async: write def"),
    ],
)
def test_a_mistake_has_a_sentence_before_the_start(name: str, problem: str) -> None:
    found = problems(name)
    assert any(problem in text for text in found), found


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("total", "returns a tensor"),
        ("detached", "without a gradient"),
        ("infinite", "infinite"),
        ("failing", "AttributeError"),
    ],
)
def test_a_mistake_that_shows_in_training_only_has_it_there(name: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=f"loss {MODULE}:{name} .*{problem}"):
        batch_loss(LossConfig(), made_batch(), users_loss(f"{MODULE}:{name}"))


def test_values_are_looked_at_in_the_first_forward_alone() -> None:
    """To look at a value is to wait for a GPU: the gradient's norm is looked at in every update."""
    loss = UsersLoss("x", lambda inputs: inputs.logprobs / inputs.rewards.sum(), repr)
    batch = made_batch()
    batch_loss(LossConfig(), batch, loss)
    late, _ = batch_loss(LossConfig(), replace(batch, rewards=torch.zeros(3)), loss)
    assert not late.isfinite()


def test_memory_that_ends_is_not_the_users_mistake() -> None:
    def full(_inputs: LossInputs) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        batch_loss(LossConfig(), made_batch(), UsersLoss("x", full, repr))


def test_an_algorithm_without_a_ratio_has_one_by_the_users_loss() -> None:
    with pytest.raises(ValueError, match="rloo has no ratio"):
        LossConfig.model_validate({"name": "rloo", "old_policy": "behaviour"})
    loss = LossConfig.model_validate(
        {"name": "rloo", "old_policy": "behaviour", "loss": CLIPPED, "clip_low": 0.2}
    )
    assert loss.has_ratio and loss.trains_without_advantage


@pytest.mark.parametrize("name", ["clipped", "losses.py:", ":clipped", "losses.py:a.b", "a b:c"])
def test_a_name_is_a_file_or_module_and_a_function(name: str) -> None:
    with pytest.raises(ValueError, match="loss"):
        LossConfig.model_validate({"loss": name})
