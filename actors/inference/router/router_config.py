"""Settings of the router."""

from ...config_base import Config, Seconds


class RouterConfig(Config):
    """The router's patience with instances.

    ``load_timeout_s``: an instance that has not acknowledged a version by then gets no more turns until it does.
    ``return_timeout_s``: a policy that has had no instance for so long ends the run; a restart and the loading of the
    weights take place in that time.
    """

    load_timeout_s: Seconds = 900.0
    return_timeout_s: Seconds = 900.0
