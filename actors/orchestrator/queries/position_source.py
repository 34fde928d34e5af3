"""The source of a recipe without one of its own: ``train_query``, position by position.

The newest queries are remembered by digest, so that a resumed run notices that its data has changed. The data is
compared as the recipe's functions return it, wherever they take it from.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import xxhash

from ....core.protocol import codec
from ...errors import DataChanged
from ...messages import Query
from ...recipe.query_source import QuerySource

_REMEMBERED: Final = 64


class PositionSource(QuerySource):
    """The queries at the positions 0, 1, 2 ... of the training data, each once."""

    def __init__(self, train_query: Callable[[int], Query]) -> None:
        self._train_query = train_query
        self._position = 0
        self._digests: deque[str] = deque(maxlen=_REMEMBERED)
        """Those of the newest queries."""

    def next(self, step: int) -> Query:
        """Raises what ``train_query`` raises."""
        query = self._train_query(self._position)
        self._position += 1
        self._digests.append(digest(query))
        return query

    def state(self) -> dict[str, Any]:
        return {"position": self._position, "digests": [*self._digests]}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises DataChanged if ``train_query`` now returns another query at a position whose digest is known."""
        self._position = state["position"]
        self._digests = deque(state["digests"], maxlen=_REMEMBERED)
        for position, saved in enumerate(self._digests, self._position - len(self._digests)):
            query = self._train_query(position)
            if digest(query) != saved:
                raise DataChanged(
                    f"train_query({position}) now returns the query {query.id!r}, which differs from that of the run"
                )


def digest(query: Query) -> str:
    """The digest of the query's id, text and data."""
    return xxhash.xxh3_64_hexdigest(codec.Encoder(inline_bytes=codec.MAX_BODY_BYTES).pack(query))


def digest_of_all(queries: Sequence[Query]) -> str:
    """One digest of a list of queries, which depends on their order."""
    return xxhash.xxh3_64_hexdigest(" ".join(map(digest, queries)).encode())
