"""Digests of the queries that a run has drawn: a resumed run finds that its data has changed.

The data is compared as the recipe's functions return it, wherever they take it from.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import xxhash

from ....core.protocol import codec
from ...errors import DataChanged
from ...messages import Query
from ...recipe import Recipe
from ..checkpoint import RunState

_REMEMBERED = 64


def digest(query: Query) -> str:
    """The digest of the query's id, text and data."""
    return xxhash.xxh3_64_hexdigest(codec.Encoder(inline_bytes=codec.MAX_BODY_BYTES).pack(query))


def digest_of_all(queries: Sequence[Query]) -> str:
    return xxhash.xxh3_64_hexdigest(" ".join(map(digest, queries)).encode())


class QueryDigests:
    """The digests of the newest training queries, by position."""

    def __init__(self, before: Mapping[int, str]) -> None:
        """``before``: of the run that is resumed."""
        self._drawn: deque[tuple[int, str]] = deque(before.items(), maxlen=_REMEMBERED)

    def drew(self, positions: range, queries: Sequence[Query]) -> None:
        newest = [*zip(positions, queries, strict=True)][-_REMEMBERED:]
        self._drawn += [(position, digest(query)) for position, query in newest]

    def before(self, position: int) -> dict[int, str]:
        """Those before ``position``."""
        return {drawn: of_query for drawn, of_query in self._drawn if drawn < position}


def check_data(recipe: Recipe, resumed: RunState) -> None:
    """Raises DataChanged if the recipe now returns other queries than in the run that is resumed."""
    check_training(resumed.queries, {position: recipe.train_query(position) for position in resumed.queries})
    if resumed.evaluation_queries:
        check_evaluation(resumed.evaluation_queries, recipe.eval_queries())


def check_training(made: Mapping[int, str], queries: Mapping[int, Query]) -> None:
    """Raises DataChanged if the query at a position is another one than ``made`` has."""
    for position, query in queries.items():
        if digest(query) != made[position]:
            raise DataChanged(
                f"train_query({position}) now returns the query {query.id!r}, which differs from that of the run"
            )


def check_evaluation(made: str, queries: Sequence[Query]) -> None:
    """Raises DataChanged if the evaluation has other queries. ``made``: empty if there was no evaluation."""
    if made and digest_of_all(queries) != made:
        raise DataChanged("eval_queries now returns other queries than those that the run was evaluated on")
