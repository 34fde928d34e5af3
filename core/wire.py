"""How messages leave and reach a process: the interface that ``wire_zmq`` implements.

A wire listens on one address and connects to others. Everything that arrives is handed to ``receive``
together with the link it came by; a reply goes out by the same link.
"""

from collections.abc import Callable
from typing import Protocol


class Link(Protocol):
    """One peer as seen from here. Sending never blocks and keeps the order of the calls."""

    def send(self, envelope: bytes) -> None: ...


Receive = Callable[[Link, bytes, bytes], None]


class Wire(Protocol):
    @property
    def address(self) -> str:
        """Where peers reach this wire."""
        ...

    def start(self, receive: Receive) -> None:
        """Binds and begins to deliver on the running loop. Raises OSError where the address is taken."""
        ...

    def connect(self, address: str) -> Link:
        """A link to the wire that listens on ``address``, whether or not somebody listens there yet."""
        ...

    def close(self) -> None:
        """Sends what is queued (bounded by a short linger) and stops."""
        ...
