"""Settings of an instance and its engine."""

from ..config_base import Config, Count


class EngineConfig(Config):
    """The embedded engine of one instance.

    ``max_batch`` is the number of sequences decoded together; ``max_context`` the number of tokens
    (prompt + generated) that one sequence may hold, by default what the model's config allows. Keys and values
    take memory for as many rows as are active times the longest of them.
    """

    max_batch: Count = 64
    max_context: Count | None = None
