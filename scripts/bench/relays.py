"""Measures a large version on its way to several hosts, which pass it on to each other.

Hosts are network namespaces of this machine around a switch. Each has a port of ``--mbit`` in each direction, so that
the ports decide and not the processors, which all hosts share. The keys of the result:

    one_s        until one host has a version of which every byte is new, alone
    all_s        until all have it, if all ask at once
    ratio        the second / the first; the number of hosts, if each had it from the owner
    port_s       the bytes / the bandwidth of a port: none is faster
    relayed      bytes that came from other readers / all bytes
    relays_left  copies that were given up for the owner
    rounds       ``one_s`` and ``all_s`` of each
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import click

from flexmarl.core import Keys
from flexmarl.launch.bench import namespaces
from flexmarl.launch.errors import BenchmarkFailed
from flexmarl.launch.hosts import env

_PEER: Final = Path(__file__).with_name("relays_peer.py")
_LATENCY_MS: Final = 50  # of the limit's queue: less would drop packets, and measure TCP


@contextmanager
def switched_hosts(count: int, mbit: int) -> Iterator[list[namespaces.Host]]:
    """Hosts with a port each. Raises OSError."""
    with namespaces.network_of() as _:  # removes what killed processes have left
        prefix = f"flexmarl-{os.getpid()}"
        names = [f"{prefix}-host{number}" for number in range(count)]
        switch = f"{prefix}-switch"
        try:
            for name in (switch, *names):
                _run("ip", "netns", "add", name)
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            yield [_connect(switch, name, number, mbit) for number, name in enumerate(names)]
        finally:
            for name in (switch, *names):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _connect(switch: str, name: str, number: int, mbit: int) -> namespaces.Host:
    port, address = f"port{number}", f"10.77.0.{number + 1}"
    pair = ("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", *pair)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _run("ip", "-n", name, "link", "set", device, "up")
    limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "1mb", "latency", f"{_LATENCY_MS}ms")
    for namespace, device in ((name, "eth0"), (switch, port)):
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *limit)
    return namespaces.Host(name, address, ("ip", "netns", "exec", name))


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


class Peer:
    """A process on ``host``."""

    def __init__(self, host: namespaces.Host, settings: Mapping[str, Any]) -> None:
        words = [*host.command, sys.executable, "-P", str(_PEER)]
        self._child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.begin({**settings, "address": host.address})

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        with self._child:  # closes its pipes
            self._child.kill()

    def begin(self, command: Mapping[str, Any]) -> None:
        """Sends a command."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(command) + "\n")
        self._child.stdin.flush()

    def end(self) -> dict[str, Any]:
        """The result of the oldest command. Raises OSError if the process has ended."""
        assert self._child.stdout is not None
        if not (line := self._child.stdout.readline()):
            raise OSError(f"a process of the measurement has ended: {self._child.wait()}")
        result: dict[str, Any] = json.loads(line)
        return result


def measure(hosts: int, size_bytes: int, mbit: int, rounds: int, *, encrypted: bool) -> dict[str, Any]:
    """The object that is printed. Raises OSError."""
    with (
        switched_hosts(hosts + 1, mbit) as places,
        TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as base,
        ExitStack() as stack,
    ):
        Keys.make().save(keys := Path(base, "keys"))
        settings = {"keys": str(keys), "size_bytes": size_bytes, "encrypted": encrypted}
        peers = []
        for place in places:
            directory = Path(base, place.name)
            directory.mkdir(mode=0o700)
            peers.append(stack.enter_context(Peer(place, {**settings, "directory": str(directory)})))
        owner, *readers = peers
        # The first two make the memory of both versions on each host, and do not count.
        alone, together = zip(
            *((_get(owner, readers[:1], 2 * n), _get(owner, readers, 2 * n + 1)) for n in range(1 + rounds)),
            strict=True,
        )
    one_s, all_s = ([max(get["seconds"] for get in gets) for gets in each[1:]] for each in (alone, together))
    counted = [get for gets in together[1:] for get in gets]
    return {
        "one_s": round(median(one_s), 3),
        "all_s": round(median(all_s), 3),
        "ratio": round(median(all_s) / median(one_s), 3),
        "port_s": round(size_bytes * 8e-6 / mbit, 3),
        "relayed": round(
            sum(get.get("relayed_bytes", 0) for get in counted) / (len(counted) * size_bytes), 3
        ),
        "relays_left": sum(get.get("relays_left", 0) for get in counted),
        "rounds": [[round(one, 3), round(both, 3)] for one, both in zip(one_s, all_s, strict=True)],
    }


def _get(owner: Peer, readers: Sequence[Peer], version: int) -> list[dict[str, Any]]:
    owner.begin({"version": version})
    handle = owner.end()["handle"]
    for reader in readers:
        reader.begin({"handle": handle})
    return [reader.end() for reader in readers]


@click.command()
@click.option("--hosts", type=click.IntRange(1, 100), default=4, show_default=True, help="Hosts that read.")
@click.option("--mib", type=click.IntRange(1), default=256, show_default=True, help="Size of the version.")
@click.option(
    "--mbit", type=click.IntRange(1), default=1000, show_default=True, help="Megabits a second of each port."
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--trusted", is_flag=True, help="Without encryption.")
def relays(hosts: int, mib: int, mbit: int, rounds: int, trusted: bool) -> None:
    """Measure a large version on its way to several hosts, which pass it on to each other.

    Needs root, ip and tc. Prints a JSON object.

    \b
    Examples:
      scripts/bench/run relays
      scripts/bench/run relays --hosts 8 --mbit 500 --trusted
    """
    if (reason := namespaces.missing()) is not None:
        raise BenchmarkFailed(f"this machine makes no hosts: {reason}")
    print(json.dumps(measure(hosts, mib << 20, mbit, rounds, encrypted=not trusted)))
