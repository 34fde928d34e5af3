"""Budgets: words for people, and whole hosts."""

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.simulate.cluster_config import ClusterConfig
from flexmarl.launch.simulate.planning.budget import cluster_settings

CLUSTER = ClusterConfig.model_validate({"hosts": 4, "devices": 8, "device": "H100"})


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("64 devices", ["cluster.hosts=8"]),
        ("16", ["cluster.hosts=2"]),
        ("1 device", ["cluster.hosts=1", "cluster.devices=1"]),
        ("8", ["cluster.hosts=1", "cluster.devices=8"]),
    ],
)
def test_devices_fill_hosts(words: str, settings: list[str]) -> None:
    assert cluster_settings(words, CLUSTER) == settings


def test_a_part_of_a_host_is_refused_with_the_nearest_numbers() -> None:
    with pytest.raises(ConfigError, match="8 devices: take 16 or 24"):
        cluster_settings("20 devices", CLUSTER)


@pytest.mark.parametrize("words", ["", "0", "-8", "many devices", "8 hosts", "8.5"])
def test_other_words_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="write a number of devices"):
        cluster_settings(words, CLUSTER)
