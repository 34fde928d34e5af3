"""All the peers of a system: who is connected, who is dead, which idempotent calls were answered."""

import asyncio
import itertools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ..durable.reply_journal import Journal
from ..errors import (
    FlexmarlError,
    JournalError,
    LocalProtocolError,
    RemoteProtocolError,
    SystemClosed,
    text_of,
)
from ..protocol import codec
from ..protocol.envelopes import Kind
from ..protocol.reply_cache import Key, Replies, RepliesStatistics
from ..protocol.session import Settings
from ..telemetry import get_logger
from ..wire.wire import Frames, Link, Wire
from .connection import Peer
from .mailbox import Mailbox

log = get_logger(__name__)

# Who reached us, was silent for so long and has nothing here that is being served is forgotten.
_SILENT_S = 600.0


class Network:
    """What the wire tells goes to the peer it concerns (``wire.Listener``); what peers need of the system is here
    (``peer.Home``)."""

    def __init__(self, name: str, wire: Wire, settings: Settings, mailboxes: dict[str, Mailbox]) -> None:
        self.name = name
        self.settings = settings
        self.refused_messages = 0
        self._wire = wire
        self.mailboxes = mailboxes
        self._peers: dict[str, Peer] = {}  # those that were asked for something, by address
        self._incoming: dict[Peer, None] = {}
        self.on_crash: Callable[[], None] = lambda: None
        self._dead: dict[str, FlexmarlError] = {}
        self._watched_processes: set[str] = set()
        self._answers: Journal | Replies | None = None
        self.link_numbers: Iterator[int] = itertools.count()
        self.trace_ids: Iterator[int] = itertools.count(zlib.crc32(f"{name} {wire.epoch}".encode()) << 31 | 1)
        self._forget_at = 0.0
        self._closed = False

    def start(self, journal: Path | None) -> None:
        """Binds. ``journal``: where answers to idempotent calls outlive this process; None: nowhere."""
        self._journal = journal
        self._header = codec.pack_header(self.name, self._wire.epoch)
        self._loop = asyncio.get_running_loop()
        self._wire.start(self._header, self)

    async def until_told(self, timeout_s: float) -> None:
        """Waits until the one-way messages from here have been worked off; not for longer than ``timeout_s``."""
        waiting = [
            asyncio.ensure_future(peer.until_told()) for peer in self.peers if peer.session.open_tells()
        ]
        if waiting:
            for late in (await asyncio.wait(waiting, timeout=timeout_s))[1]:
                late.cancel()

    def close(self) -> None:
        self._closed = True
        for peer in (*self._peers.values(), *self._incoming):
            peer.close()
        self._wire.close()
        if isinstance(self._answers, Journal):
            self._answers.close()
            if self._journal is not None:  # left by a crash alone: for the next incarnation
                self._journal.unlink(missing_ok=True)

    @property
    def address(self) -> str:
        return self._wire.address

    @property
    def peers(self) -> list[Peer]:
        return [*self._peers.values(), *self._incoming]

    def peer(self, address: str) -> Peer:
        """For asking something of whoever listens on ``address``.

        Raises SystemClosed, LocalProtocolError where it is no address, PlainTcpRefused, or why it is dead.
        """
        peer = self._peers.get(address)
        if peer is not None:
            return peer
        if self._closed:
            raise SystemClosed(f"{self.name} is closed")
        if address in self._dead:
            raise self._dead[address]
        try:
            link = self._loopback() if address == self.address else self._wire.connect(address)
        except OSError as error:
            raise LocalProtocolError(f"{address!r} is no address of a system: {error}") from error
        link.peer = peer = self._peers[address] = Peer(self, link, up=False)
        if address == self.address:
            peer.connected()
        return peer

    def _loopback(self) -> Link:
        """To this very system: the same encoding, so that nobody shares what they can change; no socket."""
        there: Link

        def back_and_forth(to: Link, frames: list[codec.Bytes]) -> None:
            self._loop.call_soon(self.received, to, frames[0], frames[1], frames[2:])

        here = Link(self.address, self._header, lambda frames: back_and_forth(there, frames))
        there = Link(self.address, self._header, lambda frames: back_and_forth(here, frames))
        return here

    # ------------------------------------------------------------------ who is dead

    def watch_process(self, address: str) -> None:
        """Somebody here will say why the process at ``address`` ended: ``process_ended``."""
        self._watched_processes.add(address)
        if self._dead.pop(address, None) is not None:  # a new one of the same name
            self._peers.pop(address, None)

    def process_ended(self, address: str, error: FlexmarlError, *, for_good: bool) -> None:
        """What was asked of ``address`` raises ``error``; ``for_good``: and all that will be."""
        if for_good:
            self._watched_processes.discard(address)
            self._dead[address] = error
        peer = self._peers.get(address)
        if peer is not None:
            peer.fail(error, for_good=for_good)
            if for_good:
                self._wire.disconnect(peer.link)

    # ------------------------------------------------------------------ wire.Listener

    def received(self, link: Link, header: codec.Bytes, body: codec.Bytes, buffers: Frames) -> None:
        if self._closed:
            return
        peer: Peer | None = link.peer
        if peer is None:
            self._forget_silent()
            link.peer = peer = Peer(self, link, up=True)
            self._incoming[peer] = None
        try:
            peer.received(header, body, buffers)
        except RemoteProtocolError as error:
            self._refuse(peer, link, error)

    def _refuse(self, peer: Peer, link: Link, error: RemoteProtocolError) -> None:
        self.refused_messages += 1
        log.warning("message refused", system=self.name, peer=peer.node or link.address, error=text_of(error))
        if peer not in self._incoming:
            peer.refused(text_of(error))
            return
        link.send(codec.Encoder().pack([Kind.REFUSE, 0, text_of(error)[:1000]]))
        if not peer.node:  # a stranger: nothing is kept of it
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
        if isinstance(self._answers, Journal):
            self._answers.close()  # and left for the next incarnation
            self._answers = None
        self.on_crash()

    def refused(self, link: Link, reason: str) -> None:
        if link.peer is not None:
            link.peer.unreachable(reason)

    # ------------------------------------------------------------------ peer.Home

    def answered_before(self, key: Key) -> bytes | None:
        answers = self._known_answers()
        return b"" if answers.is_settled(key) else answers.get(key)

    def remember_answer(self, key: Key, floor: int, answer: bytes) -> None:
        answers, (sender, epoch, _) = self._known_answers(), key
        answers.forget_sender(sender, epoch)  # of its earlier incarnations nothing comes any more
        answers.settle(sender, epoch, floor)
        answers.put(key, answer)

    def _known_answers(self) -> Journal | Replies:
        if self._answers is None:  # most systems serve no idempotent call ever
            self._answers = Replies() if self._journal is None else self._open_journal(self._journal)
        return self._answers

    def _open_journal(self, path: Path) -> Journal | Replies:
        try:
            return Journal.open(path)
        except (OSError, JournalError) as error:
            words = "idempotent calls are known in memory alone: a restart forgets which were answered"
            log.error(words, system=self.name, error=text_of(error))
            return Replies()

    def answers(self) -> RepliesStatistics | None:
        """None where no idempotent call has been served."""
        return None if self._answers is None else self._answers.statistics()

    def obituary_follows(self, address: str) -> bool:
        return address in self._watched_processes

    def peer_left(self, link: Link) -> None:
        self._incoming.pop(link.peer, None)
        link.peer = None
        self._wire.disconnect(link)

    def _forget_silent(self) -> None:
        """Of those that reached us, the ones which left without a goodbye. One that comes again is a new one."""
        now = self._loop.time()
        if now >= self._forget_at:
            self._forget_at = now + _SILENT_S
            for peer in list(self._incoming):
                if not peer.was_heard():
                    self.peer_left(peer.link)
