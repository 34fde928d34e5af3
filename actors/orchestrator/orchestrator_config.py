"""The user's settings of the training schedule: steps, batches, evaluations, checkpoints."""

from ..config_base import Config, Count, Natural


class TrainingConfig(Config):
    """A step draws ``queries_per_step`` queries and runs the workflow ``trajectories_per_query`` times on each
    (a group; one is enough for ppo and reinforce_pp, which compare nothing within it). ``micro_batch`` is the number of
    samples of one forward and backward."""

    steps: Count
    queries_per_step: Count = 16
    trajectories_per_query: Count = 8
    micro_batch: Count = 32


class EvaluationConfig(Config):
    """Greedy decoding on the recipe's evaluation queries: before the first step, after the last, and after
    every ``every`` steps between (0: not between). ``held_out``: the recipe declares that none of these queries is
    among the training queries."""

    every: Natural = 0
    held_out: bool = False


class CheckpointConfig(Config):
    """A checkpoint after every ``every`` steps (0: only the last), of which the newest ``keep`` stay."""

    every: Natural = 50
    keep: Count = 2
