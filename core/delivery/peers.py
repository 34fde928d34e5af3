"""All peers of a system: connections and dead processes."""

import asyncio
import errno
import itertools
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator

from ..errors import (
    FlexmarlError,
    LocalProtocolError,
    RemoteProtocolError,
    SystemClosed,
    Unreachable,
    text_of,
)
from ..protocol import codec, messages
from ..protocol.envelopes import Kind
from ..protocol.incarnations import Incarnations
from ..protocol.session import Settings
from ..telemetry import BoundedLog, get_logger
from ..wire.wire import Frames, Link, Wire
from .connection import Peer
from .mailbox import Mailbox

log = get_logger(__name__)

# Peers that have connected, are idle this long and have no request in service are dropped.
_IDLE_S = 600.0
# From here on connections to systems that have gone are forgotten.
_MANY_PEERS = 64
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
        self.mailboxes = mailboxes
        self._peers: dict[str, Peer] = {}  # those that this side calls, by address
        self._incoming: dict[Peer, None] = {}
        self.on_crash: Callable[[], None] = lambda: None
        self._prune_at = _MANY_PEERS
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
        waiting = [asyncio.ensure_future(peer.wait_tells_done()) for peer in self.peers if peer.has_tells()]
        if waiting:
            for late in (await asyncio.wait(waiting, timeout=timeout_s))[1]:
                late.cancel()

    def close(self) -> None:
        self._closed = True
        for peer in (*self._peers.values(), *self._incoming):
            peer.close()
        self._wire.close()
        self._refusals.close()

    @property
    def address(self) -> str:
        return self._wire.address

    @property
    def peers(self) -> list[Peer]:
        return [*self._peers.values(), *self._incoming]

    def peer(self, address: str) -> Peer:
        """The connection to the system that listens on ``address``.

        Raises SystemClosed, LocalProtocolError for an invalid address, PlainTcpRefused, or the reason of its death.
        """
        peer = self._peers.get(address)
        if peer is not None:
            return peer
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
        link.peer = peer = self._peers[address] = Peer(self, link, up=False)
        if address == self.address:
            peer.connected()
        return peer

    def _loopback(self) -> Link:
        """A link to this system itself: encoded like any other, so that actors share no mutable values; no socket."""
        there: Link

        def back_and_forth(to: Link, frames: list[codec.Bytes]) -> None:
            self._loop.call_soon(self.received, to, frames[0], frames[1:])

        here = Link(self.address, self._header, lambda frames: back_and_forth(there, frames))
        there = Link(self.address, self._header, lambda frames: back_and_forth(here, frames))
        return here

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
            self._peers.pop(address, None)

    def unwatch_process(self, address: str) -> None:
        """No exit reason of a process at ``address`` will be given any more."""
        self._watched_processes.discard(address)

    def process_ended(self, address: str, error: FlexmarlError, *, for_good: bool) -> None:
        """Fails the pending calls to ``address`` with ``error``; with ``for_good`` all later ones too."""
        if for_good:
            self._watched_processes.discard(address)
            self._dead[address] = error
            if len(self._dead) > _REMEMBERED_DEATHS:
                self._peers.pop(self._dead.popitem(last=False)[0], None)
        peer = self._peers.get(address)
        if peer is not None:
            peer.fail(error, for_good=for_good)
            if for_good:
                self._wire.disconnect(peer.link)

    def _forget_gone(self) -> None:
        """Ends the attempts to reach systems that have gone, and to which no request is open, once there are many."""
        if len(self._peers) >= self._prune_at:
            for peer in [peer for peer in self._peers.values() if peer.is_gone]:
                del self._peers[peer.address]  # a later call makes another connection
                peer.fail(Unreachable("system", f"there is no connection to {peer.address}"), for_good=True)
                self._wire.disconnect(peer.link)
            self._prune_at = max(_MANY_PEERS, 2 * len(self._peers))

    # ------------------------------------------------------------------ wire.Listener

    def received(self, link: Link, message: codec.Bytes, buffers: Frames) -> None:
        if self._closed:
            return
        peer: Peer | None = link.peer
        if peer is None:
            self._drop_silent()
            link.peer = peer = Peer(self, link, up=True)
            self._incoming[peer] = None
        try:
            peer.received(message, buffers)
        except RemoteProtocolError as error:
            self._refuse(peer, link, error)

    def _refuse(self, peer: Peer, link: Link, error: RemoteProtocolError) -> None:
        self.refused_messages += 1
        self._refusals.warning(
            "message refused", system=self.name, peer=peer.node or link.address, error=text_of(error)
        )
        if peer not in self._incoming:
            peer.refused(text_of(error))
            return
        link.send(codec.Encoder().pack([Kind.REFUSE, 0, text_of(error)[:1000]]))
        if not peer.node:  # a stranger: it is dropped
            link.flush()
            self.peer_left(link)

    def connected(self, link: Link) -> None:
        if link.peer is not None:
            link.peer.connected()

    def disconnected(self, link: Link, reason: str) -> None:
        if link.peer is not None:
            link.peer.disconnected(reason)

    def crashed(self) -> None:
        self._closed = True
        for peer in self.peers:
            peer.close()
        self.on_crash()

    def refused(self, link: Link, reason: str) -> None:
        if link.peer is not None:
            link.peer.unreachable(reason)

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
            for peer in self.peers:
                if peer.session.epoch is not None and self.is_replaced(peer.session.epoch):
                    peer.replaced()

    def peer_left(self, link: Link) -> None:
        if link.peer is not None:
            link.peer.serving.leave()
            self._incoming.pop(link.peer, None)
            link.peer = None
        self._wire.disconnect(link)

    def _drop_silent(self) -> None:
        """Drops the peers that have connected and left without a goodbye. One that returns is a new peer."""
        now = self._loop.time()
        if now >= self._drop_at:
            self._drop_at = now + _IDLE_S
            for peer in list(self._incoming):
                if not peer.was_heard():
                    self.peer_left(peer.link)
