"""Faults of the links between hosts that are network namespaces."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from flexmarl.launch.bench import namespaces
from flexmarl.launch.bench.namespaces import Host


def missing() -> str | None:
    """The reason why links can't be troubled here; None if they can."""
    if (reason := namespaces.missing()) is not None:
        return reason
    if shutil.which("iptables") is None:
        return "there is no program iptables (Debian: apt-get install iptables)"
    return None


def needs(missing: str | None) -> pytest.MarkDecorator:
    """Skips a test if ``missing`` is a reason why it can't run here; in CI (``.ci/run``) it runs, and fails."""
    left_out = missing is not None and "FLEXMARL_LEAVE_NO_TEST_OUT" not in os.environ
    return pytest.mark.skipif(left_out, reason=f"network namespaces: {missing}")


def _devices(host: Host) -> list[str]:
    listed = subprocess.run(
        [*host.command, "ls", "/sys/class/net"], check=True, capture_output=True, text=True
    )
    return [device for device in listed.stdout.split() if device.startswith("veth")]


@contextlib.contextmanager
def cut(host: Host) -> Iterator[None]:
    """Nothing reaches the host, and nothing leaves it."""
    devices = _devices(host)
    try:
        for device in devices:
            subprocess.run(["ip", "-n", host.name, "link", "set", device, "down"], check=True)
        yield
    finally:
        for device in devices:
            subprocess.run(["ip", "-n", host.name, "link", "set", device, "up"], check=True)


@contextlib.contextmanager
def cut_between(host: Host, peer: Host) -> Iterator[None]:
    """No packet passes between two hosts; both reach all others."""
    rules = [[chain, way, peer.address, "-j", "DROP"] for chain, way in (("INPUT", "-s"), ("OUTPUT", "-d"))]
    for rule in rules:
        subprocess.run([*host.command, "iptables", "-I", *rule], check=True)
    try:
        yield
    finally:
        for rule in rules:
            subprocess.run([*host.command, "iptables", "-D", *rule], check=True)


@contextlib.contextmanager
def lossy(host: Host, share: float) -> Iterator[None]:
    """A share of the packets to the host is lost, and of those from it too."""
    rules = [
        [
            chain,
            way,
            "veth+",
            "-m",
            "statistic",
            "--mode",
            "random",
            "--probability",
            str(share),
            "-j",
            "DROP",
        ]
        for chain, way in (("INPUT", "-i"), ("OUTPUT", "-o"))
    ]
    for rule in rules:
        subprocess.run([*host.command, "iptables", "-A", *rule], check=True)
    try:
        yield
    finally:
        for rule in rules:
            subprocess.run([*host.command, "iptables", "-D", *rule], check=True)
