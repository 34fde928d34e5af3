"""A policy's position on its way between processes."""

from dataclasses import replace

import numpy as np
import pytest

from flexmarl.actors.messages import Truncation
from flexmarl.actors.trainer.backends.torch_policy.forward_batches import TrainedSample
from flexmarl.actors.trainer.backends.torch_policy.held_samples import HeldSample
from flexmarl.actors.trainer.backends.torch_policy.policy_position import PolicyPosition, read_position
from flexmarl.actors.trainer.backends.torch_policy.step_totals import StepTotals

from .policies import make_samples


def test_a_position_with_held_samples_comes_back_as_it_was() -> None:
    first, second, *_ = make_samples(1)
    first = replace(
        first,
        version_changes=(1, 2),
        truncation=Truncation(top_k=5),
        logprobs=(-0.0, float("-inf"), 0.1),
        tokens=(0, 2**31 - 1, 7),
    )
    figures = np.array([0.1, -0.0, 3e38], np.float32)
    held = [HeldSample.of(TrainedSample(first, figures + 1, figures, figures + 2)), HeldSample(second)]
    position = PolicyPosition(3, StepTotals(2, 8), held, accumulated=True)
    back = read_position(position.plain())
    assert back == position
    assert repr(back.held[0]) == repr(held[0]), "signs of zeros too"


def test_held_samples_keep_the_columns_of_a_users_loss() -> None:
    sample = make_samples(1)[0]
    values = np.array([0.1, -0.0, 3e38], np.float32)
    held = [HeldSample(replace(sample, columns={"keep": values, "share": values + 1}))]
    (back,) = read_position(PolicyPosition(held=held).plain()).held
    assert [*back.sample.columns] == ["keep", "share"]
    for name, column in back.sample.columns.items():
        assert column.dtype == np.float32 and np.array_equal(column, held[0].sample.columns[name])


@pytest.mark.parametrize("held", [[], "text", b"\xc1", b"\x01", b"\x91\x80"])
def test_held_samples_of_another_kind_are_refused(held: object) -> None:
    with pytest.raises(ValueError, match="held"):
        read_position(PolicyPosition().plain() | {"held": held})
