"""Tries the address at which the run is to listen."""

import socket
from collections.abc import Iterator

from ....actors.errors import ConfigError
from ...config.run_config import RunConfig


def network_problems(config: RunConfig) -> Iterator[str]:
    """A line if no socket of this host can listen at ``network.listen``."""
    key, remedy = (
        f"network.listen={config.network.listen}",
        "write network.listen=auto, or one of this host's addresses",
    )
    try:
        tcp = config.network.tcp()
    except ConfigError as error:
        yield str(error)
        return
    if tcp is None:
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(tcp.host, tcp.port, type=socket.SOCK_STREAM)[
            0
        ]
    except OSError as error:
        yield f"{key}: this host does not know the name ({error.strerror}): {remedy}"
        return
    try:
        with socket.socket(family, kind, protocol) as trial:
            trial.bind(address)
    except OSError as error:
        yield f"{key}: this host can't listen there ({error.strerror}): {remedy}"
