"""The budget of a plan: a number of devices, in whole hosts of the cluster. Pure."""

import re
from typing import Final

from ....actors.errors import ConfigError
from ..cluster_config import ClusterConfig

_WORDS: Final = re.compile(r"\s*([1-9]\d*)\s*(?:devices?)?\s*")


def cluster_settings(words: str, cluster: ClusterConfig) -> list[str]:
    """The settings of the cluster with which it has the devices of ``--budget``. Raises ConfigError."""
    match = _WORDS.fullmatch(words)
    if match is None:
        raise ConfigError(f'--budget {words!r}: write a number of devices, as "64 devices"')
    devices, of_host = int(match[1]), cluster.devices
    if devices <= of_host:
        return ["cluster.hosts=1", f"cluster.devices={devices}"]
    if devices % of_host:
        less = devices // of_host * of_host
        raise ConfigError(
            f"--budget {words!r}: a host of the cluster has {of_host} devices: take {less} or {less + of_host}, or "
            "another cluster.devices"
        )
    return [f"cluster.hosts={devices // of_host}"]
