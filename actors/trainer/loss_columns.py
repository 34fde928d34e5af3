"""The columns of samples that training reads: those of a user's loss, a number for each token, and routes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..errors import RecipeError
from ..expert_routes import ROUTES_COLUMN, routes_column
from ..messages import Sample

NUMBERS: Final = ("tensor", "float", "int", "bool")
"""Types of such a column. A tensor has one dimension, and a number for each token of the completion; of the others all
tokens have the one of their sample."""


def with_columns(
    samples: Sequence[Sample], names: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> Iterator[Sample]:
    """The samples with the columns ``names``: ``[T]`` float32 each, and the routes of those that have any.
    ``columns``: the values by sample. Raises RecipeError for a value with another number of tokens."""
    for number, sample in enumerate(samples):
        values = {
            name: _by_token(sample, name, columns[name][number]) for name in names if name != ROUTES_COLUMN
        }
        if ROUTES_COLUMN in names and ROUTES_COLUMN in columns:  # missing if no sample of a lease has any
            values |= routes_column(columns[ROUTES_COLUMN][number])
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
