"""The system of a connection, as connections use it (``peers.Network``)."""

from collections.abc import Callable, Iterator
from typing import Protocol

from ..protocol.session import Settings
from ..wire.wire import Link
from .mailbox import Mailbox


class Home(Protocol):
    name: str
    settings: Settings
    mailboxes: dict[str, Mailbox]
    closing: bool
    """The actors of this system are being ended."""
    trace_ids: Iterator[int]
    now: Callable[[], float]
    """The clock of the wire."""

    @property
    def address(self) -> str: ...

    def exit_reason_follows(self, address: str) -> bool:
        """True if this system will learn the exit reason of the process at ``address``."""
        ...

    def is_replaced(self, epoch: int) -> bool:
        """True if a later incarnation of that process is known."""
        ...

    def heard_incarnation(self, epoch: int) -> None:
        """An incarnation that is not replaced; earlier ones are over from now on."""
        ...

    def trusts(self, address: str) -> bool:
        """True if the system at ``address`` may be silent and is not lost."""
        ...

    def peer_left(self, link: Link) -> None: ...
