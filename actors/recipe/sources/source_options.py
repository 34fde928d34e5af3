"""The base of the settings of a query source that the config names.

A source is one file beside this one, with its class and its settings, and one row of ``source_config.py``.
"""

from ...config_base import Config
from ..query_source import QuerySource


class SourceOptions(Config):
    """Settings of a query source; its ``name`` chooses the class."""

    def source(self, positions: QuerySource, seed: int) -> QuerySource:
        """The source, at the beginning of a run. ``positions``: gives the queries of ``train_query``."""
        raise NotImplementedError
