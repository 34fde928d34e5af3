"""The routes of samples to those of the rows of one forward: see ``actors/expert_routes.py``."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ....expert_routes import ROUTES_COLUMN, UNKNOWN, Routes, widen
from ....messages import Sample
from ....routers import ReplayedRoutes


def row_routes(rows: Sequence[Sequence[Sample]], *, packed: bool) -> ReplayedRoutes | None:
    """The routes of ``rows``, on the CPU: each row is samples that begin with each other, the shortest first. The rows
    lie end to end if they are ``packed``, and are padded to the longest otherwise. None if no sample has any.

    A token has the routes of the shortest of its row's samples: that of the turn which generated it. Raises
    ``ValueError`` for routes that are not of all tokens of their sample but the last, or not of one model.
    """
    shapes = {_routes(sample).shape[1:] for row in rows for sample in row if ROUTES_COLUMN in sample.columns}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"routes of several shapes: {sorted(shapes)}")
    (shape,) = shapes
    lengths = [_inputs(row[-1]) for row in rows]
    room = sum(lengths) if packed else len(rows) * max(lengths)
    experts = np.full((room, *shape), UNKNOWN, np.int16)
    start = 0
    for row, length in zip(rows, lengths, strict=True):
        for sample in reversed(row):
            if ROUTES_COLUMN in sample.columns:
                _put(experts[start : start + length], sample)
        start += length if packed else max(lengths)
    return ReplayedRoutes(torch.from_numpy(experts))


def _put(row: NDArray[np.int16], sample: Sample) -> None:
    routes = _routes(sample)
    if len(routes) != _inputs(sample):
        raise ValueError(
            f"sample {sample.sample_id}: routes of {len(routes)} tokens, and it has {_inputs(sample)} but the last"
        )
    entries = widen(routes)
    row[: len(entries)] = np.where(entries == UNKNOWN, row[: len(entries)], entries)


def _routes(sample: Sample) -> Routes:
    routes: Routes = sample.columns[ROUTES_COLUMN]
    return routes


def _inputs(sample: Sample) -> int:
    """Tokens that are computed: the last one is only predicted."""
    return len(sample.prompt_tokens) + len(sample.tokens) - 1
