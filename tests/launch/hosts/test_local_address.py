"""The address by which other hosts reach this one."""

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.hosts import local_address as module
from flexmarl.launch.hosts.local_address import own_address, own_address_toward


def test_toward_a_host_it_is_that_of_the_connection() -> None:
    assert own_address_toward("127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError):
        own_address_toward("no-such-host.invalid")


def test_a_loopback_address_of_the_name_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu1")
    found = {"gpu1": "127.0.1.1", "192.0.2.1": "10.0.0.7"}
    monkeypatch.setattr(module, "own_address_toward", lambda host: found.get(host, "127.0.0.1"))
    assert own_address() == "10.0.0.7"
    found["gpu1"] = "10.0.0.1"
    assert own_address() == "10.0.0.1"


def test_a_host_without_a_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "own_address_toward", lambda host: "127.0.0.1")
    with pytest.raises(ConfigError, match=r"network.listen=auto: .*write network.listen=ADDRESS"):
        own_address()
