"""All peers of a system: connections and dead processes."""

import asyncio
import errno
import itertools
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator

from ..base.texts import text_of
from ..errors import FlexmarlError, LocalProtocolError, RemoteProtocolError, SystemClosed, Unreachable
from ..protocol import codec, messages
from ..protocol.envelopes import Kind
from ..protocol.incarnations import Incarnations
from ..protocol.session import Settings
from ..telemetry import BoundedLog, get_logger
from ..wire.wire import Frames, Link, Wire
from .connection import Connection
from .mailbox import Mailbox

log = get_logger(__name__)

# Peers that have connected, are idle this long and have no request in service are dropped.
_IDLE_S = 600.0
# From here on connections to systems that have gone are forgotten.
_MANY_CONNECTIONS = 64
# The reasons for which processes have ended, of those that ended last.
_REMEMBERED_DEATHS = 256
# A process that was replaced is refused for as long as its successor is one of so many that were heard last.
_REMEMBERED_LINEAGES = 4096


class Network:
    """The connections of one system: dispatches the events of the wire (``wire.Listener``) to them."""

    def __init__(self, name: str, wire: Wire, settings: Settings, mailboxes: dict[str, Mailbox]) -> None:
        self.name = name
        self.settings = settings
        self.refused_messages = 0
        self._refusals = BoundedLog(log)
        self.closing = False
        """The actors of this system are being ended."""
        self._wire = wire
        self.now = wire.now
        """The clock of the wire."""
        self.wall = wire.wall
        self.mailboxes = mailboxes
        self._outgoing: dict[str, Connection] = {}  # those that this side calls, by address
        self._incoming: dict[Connection, None] = {}
        self.on_crash: Callable[[], None] = lambda: None
        self._prune_at = _MANY_CONNECTIONS
        self._dead: OrderedDict[str, FlexmarlError] = OrderedDict()
        self._watched_processes: set[str] = set()
        self._incarnations = Incarnations(_REMEMBERED_LINEAGES)
        self._trusted: set[str] = set()
        self.trace_ids: Iterator[int] = itertools.count(zlib.crc32(f"{name} {wire.epoch}".encode()) << 31 | 1)
        self._drop_at = 0.0
        self._closed = False

    def start(self) -> None:
        """Binds."""
        self._header = messages.pack_header(self.name, self._wire.epoch)
        self._loop = asyncio.get_running_loop()
        self._wire.start(self._header, self)

    def first_epoch(self, actor: str) -> int:
        """See ``Wire``."""
        return self._wire.first_epoch(actor)

    async def wait_tells_done(self, timeout_s: float) -> None:
        """Waits until all one-way messages from here have been processed; for ``timeout_s`` at most."""
        waiting = [
            asyncio.ensure_future(connection.outbound.wait_tells_done())
            for connection in self.connections
            if connection.outbound.has_tells()
        ]
        if waiting:
            for late in (await asyncio.wait(waiting, timeout=timeout_s))[1]:
                late.cancel()

    def close(self) -> None:
        """Says goodbye to all peers, fails the requests to them with SystemClosed, and closes the wire."""
        self._closed = True
        for connection in (*self._outgoing.values(), *self._incoming):
            connection.close()
        self._wire.close()
        self._refusals.close()

    @property
    def address(self) -> str:
        """The address at which others reach this system; complete once it has been started."""
        return self._wire.address

    @property
    def connections(self) -> list[Connection]:
        """Those that this side calls, and those that have connected to it."""
        return [*self._outgoing.values(), *self._incoming]

    def connection(self, address: str) -> Connection:
        """The connection to the system that listens on ``address``.

        Raises SystemClosed, LocalProtocolError for an invalid address, PlainTcpRefused, or the reason of its death.
        """
        connection = self._outgoing.get(address)
        if connection is not None:
            return connection
        if self._closed:
            raise SystemClosed(f"{self.name} is closed")
        if address in self._dead:
            raise self._dead[address]
        self._forget_gone()
        try:
            link = self._loopback() if address == self.address else self._wire.connect(address)
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise LocalProtocolError(f"there is no connection to {address!r}: {error}") from error
            raise LocalProtocolError(f"{address!r} is not the address of a system: {error}") from error
        link.connection = connection = self._outgoing[address] = Connection(self, link, up=False)
        if address == self.address:
            connection.connected()
        return connection

    def _loopback(self) -> Link:
        """A link to this system itself: encoded like any other, so that actors share no mutable values; no socket."""
        far_end: Link

        # By way of the loop, as ``Listener`` promises: an answer must not arrive while its request is still being sent.
        def back_and_forth(to: Link, frames: list[codec.Bytes]) -> None:
            self._loop.call_soon(self.received, to, frames[0], frames[1:])

        near_end = Link(self.address, self._header, lambda frames: back_and_forth(far_end, frames))
        far_end = Link(self.address, self._header, lambda frames: back_and_forth(near_end, frames))
        return near_end

    # ------------------------------------------------------------------ who is dead

    def trust(self, address: str) -> None:
        """The system at ``address``, which has not been called yet, may be silent (stopped by ctrl-Z, say) and is not
        lost: its end is noticed in another way."""
        self._trusted.add(address)

    def trusts(self, address: str) -> bool:
        """True if the system at ``address`` may be silent and is not lost."""
        return address in self._trusted

    def watch_process(self, address: str) -> None:
        """``process_ended`` will give the exit reason of the process at ``address``: failing calls wait for it."""
        self._watched_processes.add(address)
        if self._dead.pop(address, None) is not None:  # a new one of the same name
            self._outgoing.pop(address, None)

    def unwatch_process(self, address: str) -> None:
        """No exit reason of a process at ``address`` will be given any more."""
        self._watched_processes.discard(address)

    def process_ended(self, address: str, error: FlexmarlError, *, for_good: bool) -> None:
        """Fails the pending calls to ``address`` with ``error``; with ``for_good`` all later ones too."""
        if for_good:
            self._watched_processes.discard(address)
            self._dead[address] = error
            if len(self._dead) > _REMEMBERED_DEATHS:
                self._outgoing.pop(self._dead.popitem(last=False)[0], None)
        connection = self._outgoing.get(address)
        if connection is not None:
            connection.fail(error, for_good=for_good)
            if for_good:
                self._wire.disconnect(connection.link)

    def _forget_gone(self) -> None:
        """Ends the attempts to reach systems that have gone, and to which no request is open, once there are many."""
        if len(self._outgoing) >= self._prune_at:
            for connection in [
                connection for connection in self._outgoing.values() if connection.is_forgettable
            ]:
                del self._outgoing[connection.address]  # a later call makes another connection
                connection.fail(
                    Unreachable("system", f"there is no connection to {connection.address}"), for_good=True
                )
                self._wire.disconnect(connection.link)
            # Twice as many as are left: so a search of all of them costs each new connection a constant time.
            self._prune_at = max(_MANY_CONNECTIONS, 2 * len(self._outgoing))

    # ------------------------------------------------------------------ wire.Listener

    def received(self, link: Link, message: codec.Bytes, buffers: Frames) -> None:
        """See ``Listener``. A stranger's first message makes its connection: a socket alone costs nothing here."""
        if self._closed:
            return
        connection: Connection | None = link.connection
        if connection is None:
            self._drop_silent()
            link.connection = connection = Connection(self, link, up=True)
            self._incoming[connection] = None
        try:
            connection.received(message, buffers)
        except RemoteProtocolError as error:
            self._refuse(connection, link, error)

    def _refuse(self, connection: Connection, link: Link, error: RemoteProtocolError) -> None:
        self.refused_messages += 1
        self._refusals.warning(
            "message refused", system=self.name, peer=connection.node or link.address, error=text_of(error)
        )
        if connection not in self._incoming:
            connection.refused(text_of(error))
            return
        link.send(codec.Encoder().pack([Kind.REFUSE, 0, text_of(error)[:1000]]))
        if not connection.node:  # a stranger: it is dropped
            link.flush()
            self.peer_left(link)

    def connected(self, link: Link) -> None:
        """See ``Listener``."""
        if link.connection is not None:
            link.connection.connected()

    def disconnected(self, link: Link, reason: str) -> None:
        """See ``Listener``."""
        if link.connection is not None:
            link.connection.disconnected(reason)

    def crashed(self) -> None:
        """See ``Listener``."""
        self._closed = True
        for connection in self.connections:
            connection.close()
        self.on_crash()

    def refused(self, link: Link, reason: str) -> None:
        """See ``Listener``."""
        if link.connection is not None:
            link.connection.unreachable(reason)

    # ------------------------------------------------------------------ for connections

    def exit_reason_follows(self, address: str) -> bool:
        """True if this system will learn the exit reason of the process at ``address``."""
        return address in self._watched_processes

    def is_replaced(self, epoch: int) -> bool:
        """True if a later incarnation of that process is known."""
        return self._incarnations.is_over(epoch)

    def heard_incarnation(self, epoch: int) -> None:
        """Ends the earlier incarnations of the one that was heard, which is not replaced."""
        if self._incarnations.heard(epoch):
            for connection in self.connections:
                if connection.session.epoch is not None and self.is_replaced(connection.session.epoch):
                    connection.replaced()

    def peer_left(self, link: Link) -> None:
        """Drops the connection of a peer that had connected to this side. One that returns is a new peer."""
        if link.connection is not None:
            link.connection.inbound.leave()
            self._incoming.pop(link.connection, None)
            link.connection = None
        self._wire.disconnect(link)

    def _drop_silent(self) -> None:
        """Drops the peers that have connected and left without a goodbye. One that returns is a new peer."""
        now = self._loop.time()
        if now >= self._drop_at:
            self._drop_at = now + _IDLE_S
            for connection in list(self._incoming):
                if not connection.was_active():
                    self.peer_left(connection.link)
