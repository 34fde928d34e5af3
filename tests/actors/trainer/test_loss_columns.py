"""Declared columns as a user's loss gets them: a number for each token."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.trainer.loss_columns import with_columns

from .backends.torch_policy.policies import make_samples

SAMPLE = replace(make_samples(0)[0], tokens=(1, 2, 3), logprobs=(-1.0, -1.0, -1.0))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, [0.5, 0.5, 0.5]),
        (2, [2.0, 2.0, 2.0]),
        (True, [1.0, 1.0, 1.0]),
        (np.array([True, False, True]), [1.0, 0.0, 1.0]),
        (np.array([1, 2, 3], np.int64), [1.0, 2.0, 3.0]),
    ],
)
def test_one_number_is_that_of_all_tokens(value: Any, expected: list[float]) -> None:
    (sample,) = with_columns([SAMPLE], ["keep"], {"keep": [value], "other": ["text"]})
    assert [*sample.columns] == ["keep"] and sample.columns["keep"].dtype == np.float32
    assert sample.columns["keep"].tolist() == expected
    assert replace(sample, columns={}) == SAMPLE


@pytest.mark.parametrize("value", [np.ones(2), np.ones((3, 1)), "text", None])
def test_a_value_with_another_number_of_tokens_is_named(value: Any) -> None:
    problem = "a loss needs one number, or one for each of its 3 tokens"
    with pytest.raises(
        RecipeError, match=f"sample {SAMPLE.sample_id}: its column 'keep' is .*, and {problem}"
    ):
        list(with_columns([SAMPLE], ["keep"], {"keep": [value]}))
