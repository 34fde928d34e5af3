"""Settings of the router."""

from ...config_base import Config, Seconds
from .turn_lengths import Lengths


class RouterConfig(Config):
    """The router's patience with instances, and the order of turns."""

    lengths: Lengths = "mean"
    """Prediction of the length of a turn: `mean`, that of the policy's turns; `query`, that of the agent's turns for
    the same query, in this step and in earlier ones. Then turns that are expected to be long begin first, and count as
    much for their instance. For runs whose queries come again, and whose turns wait for instances."""
    load_timeout_s: Seconds = 900.0
    """Time after which an instance that has not acknowledged a version gets no more turns until it does."""
    return_timeout_s: Seconds = 900.0
    """Time without any instance of a policy, or in which a rollout worker reaches none, after which the run ends. A
    restart and the loading of the weights take place in that time."""
