"""Hosts on one machine, for benchmarks and tests: network namespaces, each two connected by a pair of veth devices.

They need root and the program ``ip`` (Debian's iproute2). Their names have the process id of their maker: those that a
killed process has left are removed by the next one. A namespace goes with its devices.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Final

import psutil

_PREFIX: Final = "flexmarl-"
_LOOPBACK: Final = "127.0.0.1"
_NEW_NETWORK: Final = 0x40000000  # CLONE_NEWNET of sched.h


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
    """``near`` and ``far``, as ``network_of`` makes them."""
    with network_of("near", "far") as (near, far):
        yield near, far


@contextmanager
def network_of(*names: str) -> Iterator[tuple[Host, ...]]:
    """Hosts that reach each other, and nothing else; without the right to make them, this one several times."""
    remove_abandoned()
    if missing() is not None:
        yield tuple(Host(name, _LOOPBACK) for name in names)
        return
    subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    hosts = []
    for number, name in enumerate(names, 1):
        namespace = f"{_PREFIX}{os.getpid()}-{name}"
        hosts.append(Host(namespace, f"{subnet}.{number}", ("ip", "netns", "exec", namespace)))
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        for (first, near), (second, far) in combinations(enumerate(hosts, 1), 2):
            _connect(near, f"veth{second}", far, f"veth{first}")
        yield tuple(hosts)
    finally:
        for name in {host.name for host in hosts} & set(_existing()):
            _ip("netns", "delete", name)


def _connect(near: Host, near_device: str, far: Host, far_device: str) -> None:
    pair = ["link", "add", near_device, "netns", near.name, "type", "veth"]
    _ip(*pair, "peer", "name", far_device, "netns", far.name)
    for host, device, peer in ((near, near_device, far), (far, far_device, near)):
        _ip("-n", host.name, "address", "add", host.address, "peer", peer.address, "dev", device)
        _ip("-n", host.name, "link", "set", device, "up")


def enter(host: Host) -> None:
    """This thread, and those that it begins, are on ``host`` from now on. Raises OSError."""
    if host.command:
        with Path("/run/netns", host.name).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"namespace {host.name}")


def remove_abandoned() -> list[str]:
    """Removes the namespaces of processes that have ended; returns their names."""
    if missing() is not None:
        return []
    names = [name for name in _existing() if not psutil.pid_exists(int(name.split("-")[1]))]
    for name in names:
        _ip("netns", "delete", name)
    return names


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
