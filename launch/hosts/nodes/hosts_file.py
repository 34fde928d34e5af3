"""The file of ``flexmarl train --hosts``: one host a line.

    # name  [user@]address   options
    gpu1    10.0.0.11
    gpu2    ada@10.0.0.12    port=2222 python=/opt/flexmarl/bin/python
    gpu3

Without an address the name is used. ``port``: of sshd. ``python``: that of a flexmarl there, by default the path of
this one's.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ....actors.errors import ConfigError
from ....core.base.names import checked_name
from ....core.base.texts import listing

_OPTIONS = ("port", "python")


@dataclass(frozen=True, slots=True)
class SshHost:
    """``destination``: as ssh takes it. ``where``: file and line, for errors."""

    name: str
    destination: str
    port: int | None
    python: str
    where: str


def read_hosts(path: Path) -> tuple[SshHost, ...]:
    """Raises ConfigError with the mistakes of all lines."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hosts {path} can't be read: {error}") from None
    hosts: list[SshHost] = []
    problems = list(_parse(lines, path, hosts))
    if not hosts and not problems:
        problems = ["it has no host"]
    if problems:
        raise ConfigError(f"--hosts {path}:{listing(problems)}")
    return tuple(hosts)


def _parse(lines: list[str], path: Path, hosts: list[SshHost]) -> Iterator[str]:
    """Adds the hosts of ``lines``; yields a sentence for each mistake."""
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _host(words, f"{path}, line {number}")
        except ValueError as error:
            yield f"line {number}: {error}"
            continue
        if any(host.name == other.name for other in hosts):
            yield f"line {number}: there is a host {host.name} already: give it another name, and its address after it"
        hosts.append(host)


def _host(words: list[str], where: str) -> SshHost:
    """Raises ValueError."""
    places = [word for word in words if "=" not in word]
    if not places or len(places) > 2:
        raise ValueError(
            "a line is NAME [USER@]ADDRESS port=PORT python=PATH; all but the name may be left out"
        )
    name, destination = checked_name(places[0]), places[-1]
    if destination.startswith("-"):
        raise ValueError(f"invalid address {destination!r}")
    options = dict(word.split("=", 1) for word in words if "=" in word)
    if unknown := [option for option in options if option not in _OPTIONS]:
        raise ValueError(f"unknown option {unknown[0]!r}: there are {', '.join(_OPTIONS)}")
    port = options.get("port")
    if port is not None and not (port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"invalid port {port!r}")
    return SshHost(
        name, destination, None if port is None else int(port), options.get("python", sys.executable), where
    )
