"""The section ``page``: the address at which a run serves its own page."""

from ....actors.config_base import Config
from ...gateway.gateway_config import ListenAddress


class PageConfig(Config):
    """The run's own page, from its start to its end: see [The page of a run](operating.md#the-page-of-a-run)."""

    listen: ListenAddress = None
    """`HOST:PORT` or `PORT` (of 127.0.0.1) at which the run serves its page, without encryption. Port 0: a free one.
    The address, with its key, is shown at the start and by `flexmarl status`. `null`: the run serves none."""
