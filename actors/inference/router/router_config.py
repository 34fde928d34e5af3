"""Settings of the router."""

from ...config_base import Config, Seconds


class RouterConfig(Config):
    """The router's patience with instances."""

    load_timeout_s: Seconds = 900.0
    """Time after which an instance that has not acknowledged a version gets no more turns until it does."""
    return_timeout_s: Seconds = 900.0
    """Time without any instance of a policy, or in which a rollout worker reaches none, after which the run ends. A
    restart and the loading of the weights take place in that time."""
