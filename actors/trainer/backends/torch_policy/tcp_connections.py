"""The TCP connections of this process, those of libraries included."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

Endpoint = tuple[str, int]
"""Host and port."""

_DESCRIPTORS: Final = Path("/proc/self/fd")
_MAPPED: Final = "::ffff:"


class Connection(NamedTuple):
    """A connection by its two ends: no two of a process have the same."""

    local: Endpoint
    peer: Endpoint


def tcp_connections() -> set[Connection]:
    """The connections that are established at present."""
    connections: set[Connection] = set()
    for sock, connection in _sockets():
        sock.close()
        connections.add(connection)
    return connections


def cut_connections(connections: set[Connection]) -> None:
    """Ends these connections, as far as they still are there, for both sides. Calls that wait for them fail."""
    for sock, connection in _sockets() if connections else ():
        with sock:
            if connection in connections:
                with suppress(OSError):  # the other side was faster
                    sock.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[socket.socket, Connection]]:
    """A duplicate of each connected socket: its owner may close it at any moment."""
    for entry in _DESCRIPTORS.iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed meanwhile
            continue
        try:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                raise OSError
            connection = Connection(_name(sock.getsockname()), _name(sock.getpeername()))
        except OSError:  # of another kind, or not connected
            sock.close()
            continue
        yield sock, connection


def _name(address: tuple[str, int]) -> Endpoint:
    return address[0].removeprefix(_MAPPED), address[1]
