"""A network in memory: many actor systems in one process, and whatever a network does to them, drawn from a seed.

    network = MemoryNetwork(seed=1, faults=Faults(delay_s=(0.001, 0.1), drop=0.01))
    async with (
        ActorSystem("a", wire=network.wire("a")) as a,
        ActorSystem("b", wire=network.wire("b")) as b,
    ): ...

Without faults it is as ZeroMQ is: in order and reliable between two nodes as long as their connection stands, a
connection that is lost is told to the side that made it and comes up again by itself, what was under way in it is gone.
Under ``virtual_time.run`` the same seed gives the same ``log``, byte by byte.
"""

import asyncio
import errno
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import RemoteProtocolError
from ..protocol import codec
from ..protocol.envelopes import Kind
from .wire import Link, Listener

Frames = list[codec.Bytes]

_SCHEME = "memory://"


@dataclass(frozen=True, slots=True)
class Faults:
    """What befalls messages. The probabilities are per message and drawn anew for each.

    ``delay_s``: the least and the most seconds that a message, or connecting, takes. ``drop``: it is lost.
    ``duplicate``: it arrives once more, up to ``late_s`` seconds later. ``reorder``: it comes up to ``late_s`` seconds
    late, and what is sent meanwhile overtakes it. Raises ValueError for what is no probability or no time.
    """

    delay_s: tuple[float, float] = (0.0, 0.0)
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    late_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "reorder"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be a probability, got {getattr(self, name)!r}")
        low, high = self.delay_s
        if not 0.0 <= low <= high or not self.late_s >= 0.0:
            raise ValueError(f"times must be ordered and not negative: {self.delay_s!r}, {self.late_s!r}")


class MemoryNetwork:
    """Nodes by name, and what is wrong between them. Use it on one running loop, virtual or real."""

    def __init__(self, seed: int = 0, faults: Faults = Faults(), *, keep_log: bool = True) -> None:
        """``keep_log``: False saves the memory and the time where nobody reads ``log``."""
        self.faults = faults
        """May be changed at any time, for the messages that are sent from then on."""
        self.random = random.Random(seed)
        """Draws every fault. A script that draws from it too is part of what the seed determines."""
        self.log: list[str] = []
        """What happened, in order: the time in seconds, who (a name and which incarnation), and what."""
        self.keeps_log = keep_log
        self._nodes: dict[str, MemoryWire] = {}
        self._numbers = itertools.count(1)
        self._group: dict[str, int] = {}
        self._switched_off: set[str] = set()

    def wire(self, name: str) -> "MemoryWire":
        """For one ``ActorSystem``, at ``memory://name``; a later one of that name is a new incarnation."""
        return MemoryWire(self, name, next(self._numbers))

    def partition(self, *groups: Iterable[str]) -> None:
        """Nodes of different groups can't reach each other any more; those in no group reach everybody. What is sent
        across is lost, connections seem to stand. Replaces the partition there was."""
        named = [sorted(group) for group in groups]
        self._group = {name: number for number, group in enumerate(named) for name in group}
        self.note("network", f"is partitioned: {' | '.join(' '.join(group) for group in named)}")

    def heal(self) -> None:
        """Ends the partition. What was lost stays lost."""
        self._group = {}
        self.note("network", "is whole")
        self._look_around()

    def crash(self, name: str, *, silently: bool = False) -> None:
        """The node ends as by ``kill -9``: no goodbye, its tasks are cancelled, no ``on_stop`` runs; its system is
        closed and ``failure`` set.

        Its peers see their connections end after the delay; ``silently``, as when a machine loses its power, only
        when a new node of that name has started. Raises KeyError where no such node runs.
        """
        node = self._nodes[name]
        self.note(node.label, "crashes silently" if silently else "crashes")
        if silently:
            self._switched_off.add(name)
        node.cut()
        node.listener.crashed()
        self._look_around()

    def pause(self, name: str) -> None:
        """As by SIGSTOP: nothing arrives at the node and nothing leaves it. Its tasks do go on, as they share the loop:
        what they send leaves at ``resume``. Raises KeyError where no such node runs."""
        self._nodes[name].paused = True
        self.note(self._nodes[name].label, "is paused")

    def resume(self, name: str) -> None:
        """As by SIGCONT: what has arrived meanwhile is received, in order. Raises KeyError where no such node runs."""
        node = self._nodes[name]
        self.note(node.label, "is resumed")
        node.resume()
        self._look_around()

    def note(self, who: str, what: str) -> None:
        """Adds a line to ``log``."""
        if self.keeps_log:
            self.log.append(f"{asyncio.get_running_loop().time()!r} {who} {what}")

    # ------------------------------------------------------------------ for the wires

    def started(self, node: "MemoryWire") -> None:
        if node.name in self._nodes:
            raise OSError(errno.EADDRINUSE, f"a node named {node.name} is running already")
        self._nodes[node.name] = node
        self._switched_off.discard(node.name)
        self.note(node.label, "starts")
        self._look_around()

    def ended(self, node: "MemoryWire") -> None:
        if self._nodes.get(node.name) is node:
            del self._nodes[node.name]

    def node(self, name: str) -> "MemoryWire | None":
        return self._nodes.get(name)

    def cut_between(self, one: str, other: str) -> bool:
        group = self._group
        return one in group and other in group and group[one] != group[other]

    def is_silent(self, name: str) -> bool:
        """Nobody can tell whether a node of that name is there."""
        return name in self._switched_off

    def delay_s(self) -> float:
        low, high = self.faults.delay_s
        return low if low == high else self.random.uniform(low, high)

    def late_s(self) -> float:
        return self.random.uniform(0.0, self.faults.late_s)

    def happens(self, probability: float) -> bool:
        return probability > 0.0 and self.random.random() < probability

    def _look_around(self) -> None:
        """Something has changed: whoever waits for a connection tries again, whoever's was lost finds out."""
        for node in list(self._nodes.values()):
            for outgoing in node.outgoing():
                outgoing.look_around()


class MemoryWire:
    """One node's way to the others (``wire.Wire``). Made by ``MemoryNetwork.wire``."""

    def __init__(self, network: MemoryNetwork, name: str, number: int) -> None:
        self.network = network
        self.name = name
        self.label = f"{name}#{number}"
        self.address = f"{_SCHEME}{name}"
        self.epoch = number << 32  # distinct above the lowest 32 bits, from which trace ids are counted
        self.paused = False
        self.running = False
        self._outgoing: dict[str, _Outgoing] = {}
        self._incoming: dict[_Outgoing, Link] = {}  # from the connecting ends of other nodes
        self._held: deque[Callable[[], None]] = deque()

    def start(self, header: bytes, listener: Listener) -> None:
        self.header = header
        self.listener = listener
        self.network.started(self)
        self.running = True

    def connect(self, address: str) -> Link:
        """Raises OSError where ``address`` is none of ``memory://NAME``."""
        if not address.startswith(_SCHEME):
            raise OSError(errno.EINVAL, f"can't connect to {address}: only {_SCHEME} is reached from here")
        known = self._outgoing.get(address)
        if known is None:
            known = self._outgoing[address] = _Outgoing(self, address)
            known.look_around()
        return known.link

    def disconnect(self, link: Link) -> None:
        outgoing = self._outgoing.get(link.address)
        if outgoing is not None and outgoing.link is link:
            del self._outgoing[link.address]
            outgoing.close()
        else:
            self._incoming = {far: known for far, known in self._incoming.items() if known is not link}

    def close(self) -> None:
        """What has been sent still arrives, then the connections end."""
        if not self.running:
            return
        for link in self._incoming.values():
            link.flush()
        for outgoing in self._outgoing.values():
            outgoing.close()
        for far in self._incoming:
            if far.connection is not None and far.connection.server is self:
                far.connection.to_client.end()
        self.network.note(self.label, "closes")
        self.cut()

    def cut(self) -> None:
        """From now on nothing leaves and nothing arrives."""
        self.running = False
        self._held.clear()
        self.network.ended(self)

    # ------------------------------------------------------------------ for the connections

    def outgoing(self) -> "list[_Outgoing]":
        return list(self._outgoing.values())

    def when_awake(self, do: Callable[[], None]) -> None:
        """Now, or in turn when the node is resumed; never once it has ended."""
        if not self.running:
            return
        if self.paused or self._held:
            self._held.append(do)
        else:
            do()

    def resume(self) -> None:
        self.paused = False
        if self._held:
            asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        while self._held and not self.paused:
            self._held[0]()  # it leaves the queue afterwards, so that nothing new overtakes those behind it
            if self._held:  # the node may have ended by it
                self._held.popleft()

    def received_from(self, far: "_Outgoing", frames: Frames) -> None:
        link = self._incoming.get(far)
        if link is None:
            if far.closed:  # this side has said goodbye to it: nothing that is late may begin anew
                return
            link = Link(f"a peer at {self.address}", self.header, lambda out: self._send_back(far, out))
            self._incoming[far] = link
        _hand_over(self.listener, link, frames)

    def _send_back(self, far: "_Outgoing", frames: Frames) -> None:
        connection = far.connection
        if connection is not None and connection.server is self and self.running:
            connection.to_client.send(frames)


class _Outgoing:
    """The connecting end: keeps a connection to whoever listens on an address."""

    def __init__(self, node: MemoryWire, address: str) -> None:
        self.node = node
        self.name = address.removeprefix(_SCHEME)
        self._unsent: list[Frames] = []
        self.link = Link(address, node.header, self._send, self._unsent.clear, self._begin_anew)
        self.connection: _Connection | None = None
        self.closed = False
        self._changing = False  # a connection is being made, or its end is on the way here

    def look_around(self) -> None:
        """The network has changed: whether this end should connect, or has lost its connection."""
        network, connection = self.node.network, self.connection
        if self.closed or self._changing or network.cut_between(self.node.name, self.name):
            return
        if connection is None:
            if self._server() is not None:
                self._soon(self._connect)
        elif not connection.server.running and not network.is_silent(self.name):
            self._soon(lambda: self.lost(connection))

    def lost(self, connection: "_Connection") -> None:
        if connection is not self.connection or self.closed:
            return
        self.node.network.note(self.node.label, f"loses its connection to {connection.server.label}")
        self._begin_anew()
        self.node.listener.disconnected(self.link, "its process ended or closed the connection")

    def close(self) -> None:
        self.link.flush()
        if self.connection is not None:
            self.connection.to_server.end()
        self.closed = True

    def _server(self) -> MemoryWire | None:
        """Who would accept a connection now."""
        network = self.node.network
        server = network.node(self.name)
        return (
            None
            if server is None or server.paused or network.cut_between(self.node.name, self.name)
            else server
        )

    def _connect(self) -> None:
        server = self._server()
        if server is None:  # gone again; it is looked for when the network has changed
            return
        self.node.network.note(self.node.label, f"is connected to {server.label}")
        self.node.listener.connected(self.link)  # what it repeats goes behind what waits here
        self.connection = _Connection(self, server)
        unsent, self._unsent[:] = self._unsent[:], ()
        for frames in unsent:
            self._send(frames)

    def _soon(self, change: Callable[[], None]) -> None:
        def now() -> None:
            self._changing = False
            if not self.closed:
                change()

        self._changing = True
        delay_s = self.node.network.delay_s()
        asyncio.get_running_loop().call_later(delay_s, lambda: self.node.when_awake(now))

    def _send(self, frames: Frames) -> None:
        if self.closed or not self.node.running:
            return
        if self.connection is None:
            self._unsent.append(frames)
        else:
            self.connection.to_server.send(frames)

    def _begin_anew(self) -> None:
        self.connection = None
        self.link.forget_unsent()
        self.look_around()


class _Connection:
    def __init__(self, client: _Outgoing, server: MemoryWire) -> None:
        self.server = server
        self.to_server = _Pipe(
            client.node,
            server,
            deliver=lambda frames: server.received_from(client, frames),
            ended=lambda: None,  # as a ROUTER, which is not told either
        )
        self.to_client = _Pipe(
            server,
            client.node,
            deliver=lambda frames: self._to_client(client, frames),
            ended=lambda: client.lost(self),
        )

    def _to_client(self, client: _Outgoing, frames: Frames) -> None:
        if client.connection is self and not client.closed:
            _hand_over(client.node.listener, client.link, frames)


class _Pipe:
    """One direction of a connection: keeps the order, but for what the faults take out of it."""

    def __init__(
        self,
        sender: MemoryWire,
        receiver: MemoryWire,
        deliver: Callable[[Frames], None],
        ended: Callable[[], None],
    ) -> None:
        self._network = sender.network
        self._sender = sender
        self._receiver = receiver
        self._deliver = deliver
        self._ended = ended
        self._ordered: deque[tuple[float, Frames | None]] = deque()  # when each is due; None: the end
        self._last_due_s = 0.0

    def send(self, frames: Frames) -> None:
        # The buffers as they are now: what their owner does with them later must not show at the receiver.
        sent: Frames = [
            frame if isinstance(frame, bytes) else memoryview(bytearray(frame)) for frame in frames
        ]
        self._sender.when_awake(lambda: self._leave(sent))

    def end(self) -> None:
        """After all that has been sent."""
        self._enqueue(None)

    def _leave(self, frames: Frames) -> None:
        network, faults = self._network, self._network.faults
        if self._is_cut():
            self._note("is lost in the partition", frames)
            return
        if network.happens(faults.drop):
            self._note("is lost", frames)
            return
        loop = asyncio.get_running_loop()
        if network.happens(faults.duplicate):
            self._note("is sent twice", frames)
            loop.call_later(network.delay_s() + network.late_s(), self._arrive, frames)
        else:
            self._note("is sent", frames)
        if network.happens(faults.reorder):
            loop.call_later(network.delay_s() + network.late_s(), self._arrive, frames)
        else:
            self._enqueue(frames)

    def _enqueue(self, frames: Frames | None) -> None:
        loop = asyncio.get_running_loop()
        delay_s = self._network.delay_s()
        self._last_due_s = max(self._last_due_s, loop.time() + delay_s)
        self._ordered.append((self._last_due_s, frames))
        if len(self._ordered) == 1:
            self._wait()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = self._ordered[0][0]
        if due_s <= loop.time():
            loop.call_soon(self._next)
        else:
            loop.call_at(due_s, self._next)

    def _next(self) -> None:
        self._arrive(self._ordered.popleft()[1])
        if self._ordered:
            self._wait()

    def _arrive(self, frames: Frames | None) -> None:
        if self._is_cut():
            if frames is not None:
                self._note("is lost in the partition", frames)
        elif frames is None:
            self._receiver.when_awake(self._ended)
        else:
            self._receiver.when_awake(lambda: self._receive(frames))

    def _receive(self, frames: Frames) -> None:
        self._note("arrives", frames)
        self._deliver(frames)

    def _is_cut(self) -> bool:
        return self._network.cut_between(self._sender.name, self._receiver.name)

    def _note(self, what: str, frames: Frames) -> None:
        if self._network.keeps_log:
            self._network.note(
                f"{self._sender.label} > {self._receiver.label}", f"{_contents(frames)} {what}"
            )


def _hand_over(listener: Listener, link: Link, frames: Frames) -> None:
    header, body, *buffers = frames
    listener.received(link, header, body, buffers)


def _contents(frames: Frames) -> str:
    """The kinds and ids of a message's envelopes."""
    try:
        envelopes = codec.unpack_envelopes(frames[1], frames[2:])
    except RemoteProtocolError:
        return "rubbish"  # a test sent it
    return ", ".join(f"{Kind(envelope[0]).name} {envelope[1]}" for envelope in envelopes)
