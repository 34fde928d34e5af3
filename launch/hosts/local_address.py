"""The address by which other hosts reach this one."""

import ipaddress
import socket
from typing import Final

from ...actors.errors import ConfigError
from . import env

AUTO: Final = "auto"
"""The value of ``network.listen`` for ``own_address``."""

_ANY_PORT: Final = 9
_FAR_AWAY: Final = "192.0.2.1"
"""An address of no host (RFC 5737): the way to it is the default route."""


def own_address() -> str:
    """The address of this host's name; if the name is unknown or has a loopback address (``/etc/hosts`` often says
    so), the address of the default route. Raises ConfigError if there is neither."""
    for host in (env.host_name(), socket.gethostname(), _FAR_AWAY):
        try:
            address = own_address_toward(host)
        except OSError:
            continue
        if not ipaddress.ip_address(address).is_loopback:
            return address
    raise ConfigError(
        "network.listen=auto: this host has no address in a network: write network.listen=ADDRESS, or connect it"
    )


def own_address_toward(host: str) -> str:
    """The address that this host has in its connections to ``host``, a name or an address. Raises OSError if the name
    is unknown or there is no way to it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # nothing is sent
        return str(probe.getsockname()[0])
