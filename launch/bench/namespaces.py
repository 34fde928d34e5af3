"""Two hosts on one machine, for benchmarks and tests: network namespaces that are connected by a pair of veth devices.

They need root and the program ``ip`` (Debian's iproute2). Their names have the process id of their maker: those that a
killed process has left are removed by the next one. A namespace goes with its devices.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Final

import psutil

_PREFIX: Final = "flexmarl-"
_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Host:
    """``command``: to be written before a command that runs there."""

    name: str
    address: str
    command: tuple[str, ...] = ()


@cache
def missing() -> str | None:
    """The reason why this process can't make namespaces; None if it can."""
    if os.geteuid() != 0:
        return "it needs root"
    if shutil.which("ip") is None:
        return "there is no program ip (Debian: apt-get install iproute2)"
    probe = f"{_PREFIX}{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("-n", probe, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
    except OSError as error:
        return f"this machine allows none: {error}"
    finally:
        subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other, and nothing else; without the right to make them, this one twice."""
    remove_abandoned()
    if missing() is not None:
        yield Host("near", _LOOPBACK), Host("far", _LOOPBACK)
        return
    names = [f"{_PREFIX}{os.getpid()}-{side}" for side in ("near", "far")]
    subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    hosts = [
        Host(name, f"{subnet}.{number}", ("ip", "netns", "exec", name))
        for number, name in enumerate(names, 1)
    ]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            "veth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "veth0",
            "netns",
            names[1],
        )
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "veth0")
            for device in ("veth0", "lo"):
                _ip("-n", host.name, "link", "set", device, "up")
        yield hosts[0], hosts[1]
    finally:
        for name in set(names) & set(_existing()):
            _ip("netns", "delete", name)


def remove_abandoned() -> list[str]:
    """Removes the namespaces of processes that have ended; returns their names."""
    if missing() is not None:
        return []
    left = [name for name in _existing() if not psutil.pid_exists(int(name.split("-")[1]))]
    for name in left:
        _ip("netns", "delete", name)
    return left


def _existing() -> list[str]:
    lines = _ip("netns", "list").splitlines()
    names = [line.split()[0] for line in lines if line.strip()]
    return [name for name in names if name.startswith(_PREFIX) and name.split("-")[1].isdigit()]


def _ip(*arguments: str) -> str:
    """Raises OSError with what ``ip`` has said."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
