"""The source that a run has if its config names none."""

from typing import Literal

from ..query_source import QuerySource
from .source_options import SourceOptions


class PlainSourceConfig(SourceOptions):
    """The recipe's own source, or the queries of ``train_query`` position by position."""

    name: Literal["recipe"] = "recipe"
    """Source of the training queries. `recipe`: `query_source` of `workflow.py`, or without one the positions of
    `train_query`; the others: see [Sources by name](query-sources.md#sources-by-name)."""

    def source(self, positions: QuerySource, seed: int) -> QuerySource:
        return positions
