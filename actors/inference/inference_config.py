"""Settings of an instance's engine."""

from ..config_base import Config, Count


class EngineConfig(Config):
    """The embedded engine of one instance.

    ``max_batch``: sequences that are decoded together. ``max_context``: tokens of one sequence, prompt and completion;
    by default the limit in the model's config. The cache of keys and values has as many rows as sequences run, each as
    long as the longest.
    """

    max_batch: Count = 64
    max_context: Count | None = None
