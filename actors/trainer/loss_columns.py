"""The columns of samples that training reads: those of a user's loss, a number for each token, and routes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..errors import RecipeError
from ..expert_routes import Routes, routes_column
from ..messages import Sample

NUMBERS: Final = ("tensor", "float", "int", "bool")
"""Types of such a column. A tensor has one dimension, and a number for each token of the completion; of the others all
tokens have the one of their sample."""


def with_columns(
    samples: Sequence[Sample], names: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> Iterator[Sample]:
    """The samples with the columns ``names``, ``[T]`` float32 each. ``columns``: the values by sample. Raises
    RecipeError for a value with another number of tokens."""
    for number, sample in enumerate(samples):
        values = {name: _by_token(sample, name, columns[name][number]) for name in names}
        yield replace(sample, columns=values)


def _by_token(sample: Sample, name: str, value: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    tokens = len(sample.tokens)
    numbers = np.asarray(value)
    if numbers.dtype.kind not in "fiub" or numbers.shape not in ((), (tokens,)):
        raise RecipeError(
            f"sample {sample.sample_id}: its column {name!r} is {numbers.dtype} {list(numbers.shape)}, and a loss "
            f"needs one number, or one for each of its {tokens} tokens"
        )
    return np.broadcast_to(numbers.astype(np.float32), tokens).copy()


def with_routes(samples: Sequence[Sample], routes: Sequence[Routes | None]) -> Iterator[Sample]:
    """The samples with the routes of their tokens, those that have any, beside their other columns."""
    for sample, array in zip(samples, routes, strict=True):
        yield replace(sample, columns=sample.columns | routes_column(array))
