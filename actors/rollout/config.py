"""What a run configures about generating: sampling and the embedded engine."""

from ...core.config import Config, Count, Positive, Seconds, Share


class SamplingConfig(Config):
    """How an agent's training samples are drawn; evaluations decode greedily."""

    temperature: Positive = 1.0
    max_new_tokens: Count = 64


class EngineConfig(Config):
    """The embedded engine of one instance.

    ``max_batch`` is the number of sequences decoded together; ``max_context`` the number of tokens
    (prompt + generated) that one sequence may hold, by default what the model's config allows. Keys and values
    take memory for as many rows as are active times the longest of them.
    """

    max_batch: Count = 64
    max_context: Count | None = None


class RolloutConfig(Config):
    """How workflows run.

    A trajectory that raises is dropped and counted; ``max_failed_share`` of the trajectories of one
    step is how many may fail before the run ends with the first traceback. A trajectory or a single turn
    that takes longer than its timeout counts as failed.
    """

    max_failed_share: Share = 0.25
    trajectory_timeout_s: Seconds = 1800.0
    turn_timeout_s: Seconds = 600.0
