"""A network in memory: many actor systems in one process, with the faults of a network, drawn from a seed.

    network = MemoryNetwork(seed=1, faults=Faults(delay_s=(0.001, 0.1), drop=0.01))
    async with (
        ActorSystem("a", wire=network.wire("a")) as a,
        ActorSystem("b", wire=network.wire("b")) as b,
    ): ...

Without faults it behaves as ZeroMQ does: messages between two nodes are in order and reliable as long as their
connection stands; the loss of a connection is reported to the side that made it, which connects again by itself;
messages under way are lost with it. Under ``virtual_time.run`` the same seed gives the same ``log``, byte by byte.

Nodes may share a host: its name is the part of theirs before a slash. Links are cut, and hosts paused, by these names.
"""

import asyncio
import errno
import itertools
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable

from ..protocol.incarnations import lineage_of
from .faults import NO_FAULTS, Faults, FaultyMedium, Frames, Pipe
from .links import LinkTable, OutgoingEvent, OutgoingLink, OutgoingState
from .wire import Link, Listener

__all__ = ["Faults", "MemoryNetwork", "MemoryWire"]

_SCHEME = "memory://"


def host_of(name: str) -> str:
    """The host of a node: ``a`` for ``a/b``, and for ``a``."""
    return name.partition("/")[0]


def lineage(name: str) -> int:
    """The epoch before the first: all nodes of one name are one lineage, the same in each run."""
    # Not ``hash``, which differs between processes for a text, and would make the log of a seed differ too.
    return zlib.crc32(name.encode()) << 24


class MemoryNetwork(FaultyMedium):
    """Nodes by name, and the faults between them. For one running loop, virtual or real.

    Attributes that scripts use: ``faults``, ``random``, ``log`` (see ``FaultyMedium``).
    """

    def __init__(self, seed: int = 0, faults: Faults = NO_FAULTS, *, keep_log: bool = True) -> None:
        """``keep_log``: False saves the memory and the time of ``log``."""
        super().__init__(seed, faults, keep_log)
        self._nodes: dict[str, MemoryWire] = {}
        self._numbers = itertools.count(1)
        self._epochs: dict[int, int] = {}
        """The newest incarnation of each lineage that was started with an epoch."""
        self._switched_off: set[str] = set()
        self._paused_hosts = Counter[str]()
        self._cut_links = Counter[frozenset[str]]()
        """The cuts that last, by their two hosts, as ``_paused_hosts`` has the pauses: of two that overlap, the later
        end counts."""
        self._links: dict[str, dict[_Outgoing, None]] = {}
        """All links that nodes make, by the name of the node that they lead to."""

    def wire(self, name: str, epoch: int | None = None) -> "MemoryWire":
        """A wire for one ``ActorSystem``, at ``memory://name``; a later one of that name is a new incarnation.
        ``epoch``: None: one more than that of all earlier ones."""
        if epoch is not None:
            latest = self._epochs.get(lineage_of(epoch), epoch)
            self._epochs[lineage_of(epoch)] = max(latest, epoch)
        return MemoryWire(self, name, next(self._numbers), epoch)

    def first_epoch(self, actor: str) -> int:
        """See ``Wire``. All actors of one name are one lineage, the same in each run."""
        return self._epochs.get(lineage_of(lineage(actor)), lineage(actor))

    def partition(self, *groups: Iterable[str]) -> None:
        """Hosts of different groups can't reach each other any more; hosts in no group reach all. Messages across are
        lost, the connections seem to stand. Replaces the previous partition."""
        named = [sorted(group) for group in groups]
        pairs = itertools.combinations(named, 2)
        self.part(pair for group, other in pairs for pair in itertools.product(group, other))
        self.note("network", f"is partitioned: {' | '.join(' '.join(group) for group in named)}")

    def cut(self, host: str, other: str) -> None:
        """Messages between two hosts wait until the cut is mended, as with TCP, which sends them again. Those of a
        connection that is given up meanwhile are lost."""
        self._cut_links[frozenset((host, other))] += 1
        self._hold_cut_links()
        self.note("network", f"is cut between {host} and {other}")

    def mend(self, host: str, other: str) -> None:
        """Ends a ``cut`` between two hosts. With the last one, the messages that waited are delivered."""
        self.note("network", f"is mended between {host} and {other}")
        self._cut_links[frozenset((host, other))] -= 1
        self._hold_cut_links()
        self.check_links()

    def _hold_cut_links(self) -> None:
        self._cut_links += Counter()  # keeps those with a count
        self.hold((host, other) for host, other in map(sorted, self._cut_links))

    def heal(self) -> None:
        """Ends the partition. Lost messages stay lost."""
        self.part(())
        self.note("network", "is whole")
        self.check_links()

    def cut_between(self, host: str, other: str) -> bool:
        """Hosts that can't connect now."""
        return self.loses(host, other) or self.holds(host, other)

    def crash(self, name: str, *, silently: bool = False) -> None:
        """The node ends as by ``kill -9``: no goodbye, its tasks are cancelled, no ``on_stop`` runs; its system is
        closed and ``failure`` set.

        Its peers see their connections end after the delay; ``silently``, as when a machine loses its power, only
        when a new node of that name has started. Raises KeyError if no such node runs.
        """
        self._nodes[name].crash(silently=silently)

    def pause(self, name: str) -> None:
        """As by SIGSTOP: nothing arrives at the node and nothing leaves it. Its tasks still run, as they share the
        loop: their messages leave at ``resume``. Raises KeyError if no such node runs."""
        self._nodes[name].paused = True
        self.note(self._nodes[name].label, "is paused")

    def resume(self, name: str) -> None:
        """As by SIGCONT: messages that have arrived meanwhile are received, in order. Raises KeyError if no such node
        runs."""
        node = self._nodes[name]
        self.note(node.label, "is resumed")
        node.resume()
        self.check_links(name)

    def pause_host(self, host: str) -> None:
        """``pause`` for all nodes of a host, also those that start meanwhile."""
        self._paused_hosts[host] += 1
        for name in self._nodes_of(host):
            self.pause(name)

    def resume_host(self, host: str) -> None:
        """Ends a ``pause_host``. With the last one, all nodes of the host are resumed."""
        self._paused_hosts[host] -= 1
        self._paused_hosts += Counter()  # keeps those with a count
        if host in self._paused_hosts:
            return
        for name in self._nodes_of(host):
            self.resume(name)

    def reaches(self, host: str, other: str) -> bool:
        """The link between two hosts is not cut, and neither is paused."""
        return not (self.cut_between(host, other) or {host, other} & self._paused_hosts.keys())

    def _nodes_of(self, host: str) -> list[str]:
        return [node.name for node in self._nodes.values() if node.host == host]

    # ------------------------------------------------------------------ for the wires

    def started(self, node: "MemoryWire") -> None:
        """Takes a node into the network. Raises OSError (EADDRINUSE) if one of that name runs."""
        if node.name in self._nodes:
            raise OSError(errno.EADDRINUSE, f"a node named {node.name} is running already")
        self._nodes[node.name] = node
        node.paused = node.host in self._paused_hosts
        self._switched_off.discard(node.name)
        self.note(node.label, "starts")
        self.check_links(node.name)

    def ended(self, node: "MemoryWire") -> None:
        """Takes a node out of the network, if it has not been replaced."""
        if self._nodes.get(node.name) is node:
            del self._nodes[node.name]

    @property
    def running(self) -> list[str]:
        """The names of all nodes that run."""
        return sorted(self._nodes)

    def is_paused(self, name: str) -> bool:
        """True if a node of that name runs and is paused."""
        return name in self._nodes and self._nodes[name].paused

    def node(self, name: str) -> "MemoryWire | None":
        """The node of that name; None if it does not run."""
        return self._nodes.get(name)

    def switch_off(self, name: str) -> None:
        """Notes that a node has lost its power; see ``is_silent``."""
        self._switched_off.add(name)

    def is_silent(self, name: str) -> bool:
        """A node of that name lost its power: no peer notices that it has gone."""
        return name in self._switched_off

    def check_links(self, name: str | None = None) -> None:
        """The network, or the node ``name``, has changed: links there that wait for a connection try again, links that
        lost theirs notice it."""
        changed = [*self._links] if name is None else [name]
        # A list: a link that notices its loss may make the listener drop it, or make others.
        for link in [link for target in changed for link in self._links.get(target, ())]:
            link.check()

    def add_link(self, link: "_Outgoing") -> None:
        """Notes a link to be checked when the network changes."""
        self._links.setdefault(link.name, {})[link] = None

    def remove_link(self, link: "_Outgoing") -> None:
        """Forgets a link."""
        links = self._links.get(link.name, {})
        links.pop(link, None)
        if not links:
            self._links.pop(link.name, None)


class MemoryWire:
    """The connections of one node (``wire.Wire``). Made by ``MemoryNetwork.wire``. ``label``: its name and incarnation,
    for the log."""

    def __init__(self, network: MemoryNetwork, name: str, number: int, epoch: int | None) -> None:
        self.network = network
        self.name = name
        self.host = host_of(name)
        self.label = f"{name}#{number}"
        self.address = f"{_SCHEME}{name}"
        self.epoch = lineage(name) | number if epoch is None else epoch
        self.paused = False
        self.running = False
        self._links: LinkTable[_Outgoing, _Outgoing] = LinkTable()
        """A route is the connecting end at the other node."""
        self._held: deque[Callable[[], None]] = deque()

    def start(self, header: bytes, listener: Listener) -> None:
        """See ``Wire.start``. Raises OSError (EADDRINUSE) if a node of that name runs."""
        self.header = header
        self.listener = listener
        self.network.started(self)
        self.running = True

    def connect(self, address: str) -> Link:
        """Raises OSError if ``address`` does not begin with ``memory://``."""
        if not address.startswith(_SCHEME):
            raise OSError(errno.EINVAL, f"can't connect to {address}: only {_SCHEME} is reached from here")
        outgoing = self._links.outgoing.get(address)
        if outgoing is None:
            outgoing = self._links.outgoing[address] = _Outgoing(self, address)
            self.network.add_link(outgoing)
            outgoing.check()
        return outgoing.link

    def first_epoch(self, actor: str) -> int:
        """See ``MemoryNetwork.first_epoch``."""
        return self.network.first_epoch(actor)

    def now(self) -> float:
        """The time of the loop, in seconds."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """See ``Wire.wall``."""
        loop = asyncio.get_running_loop()
        return loop.time() if getattr(loop, "is_virtual", False) else time.time()

    def disconnect(self, link: Link) -> None:
        """See ``Wire.disconnect``."""
        self._links.disconnect(link)

    def close(self) -> None:
        """Messages that were sent still arrive, then the connections end."""
        if not self.running:
            return
        self._links.close()
        for far in self._links.incoming:
            if far.connection is not None and far.connection.server is self:
                far.connection.to_client.end()
        self.network.note(self.label, "closes")
        self.cut()

    def crash(self, *, silently: bool = False) -> None:
        """See ``MemoryNetwork.crash``."""
        if silently:
            self.network.switch_off(self.name)
        self.network.note(self.label, "crashes silently" if silently else "crashes")
        self.cut()
        self.listener.crashed()
        self.network.check_links(self.name)

    def cut(self) -> None:
        """From now on nothing leaves and nothing arrives."""
        self.running = False
        self._held.clear()
        for link in self._links.outgoing.values():
            self.network.remove_link(link)
        self.network.ended(self)

    # ------------------------------------------------------------------ for the connections

    def when_awake(self, do: Callable[[], None]) -> None:
        """Runs ``do`` now, or when the node is resumed; never after it has ended."""
        if not self.running:
            return
        if self.paused or self._held:
            self._held.append(do)
        else:
            do()

    def resume(self) -> None:
        """Delivers what has waited while the node was paused, in order."""
        self.paused = False
        if self._held:
            asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        while self._held and not self.paused:
            self._held[0]()  # it leaves the queue afterwards, so that nothing new overtakes those behind it
            if self._held:  # the node may have ended by it
                self._held.popleft()

    def received_from(self, far: "_Outgoing", frames: Frames) -> None:
        """Delivers a message of another node's connecting end, at this end's link to it."""
        link = self._links.incoming.get(far)
        if link is None:
            # This side has dropped the peer: a late message must not bring it back.
            if far.state is OutgoingState.CLOSED:
                return
            link = Link(f"a peer at {self.address}", self.header, lambda out: self._send_back(far, out))
            self._links.incoming[far] = link
        self.listener.received(link, frames[0], frames[1:])

    def _send_back(self, far: "_Outgoing", frames: Frames) -> None:
        connection = far.connection
        if connection is not None and connection.server is self and self.running:
            connection.to_client.send(frames)


class _Outgoing(OutgoingLink):
    """The connecting end: keeps a connection to the node that listens on an address."""

    def __init__(self, node: MemoryWire, address: str) -> None:
        super().__init__(node.listener, address, node.header)
        self.node = node
        self.name = address.removeprefix(_SCHEME)
        self._host = host_of(self.name)
        self.connection: _Connection | None = None
        self._changing = False  # a connection is being made, or its end is on the way here

    def check(self) -> None:
        """The network has changed: begins to connect, or notices that the connection is lost."""
        network, connection = self.node.network, self.connection
        if self._changing or network.cut_between(self.node.host, self._host):
            return
        if connection is None:
            if self._server() is not None:
                self._soon(self._connect)
        elif not connection.server.running and not network.is_silent(self.name):
            self._soon(lambda: self.lost(connection))

    _open = check

    def _disconnect(self) -> None:
        self.connection = None

    def lost(self, connection: "_Connection") -> None:
        if connection is self.connection and self._state is OutgoingState.UP:
            self.node.network.note(self.node.label, f"loses its connection to {connection.server.label}")
            self._lose("its process ended or closed the connection")

    def close(self) -> None:
        self.link.flush()
        if self.connection is not None:
            self.connection.to_server.end()
        self.node.network.remove_link(self)
        self._move(OutgoingEvent.CLOSED)

    def _server(self) -> MemoryWire | None:
        """The node that would accept a connection now."""
        network = self.node.network
        server = network.node(self.name)
        return (
            None
            if server is None or server.paused or network.cut_between(self.node.host, self._host)
            else server
        )

    def _connect(self) -> None:
        server = self._server()
        if server is None:  # gone again; the next change of the network begins the next attempt
            return
        self.node.network.note(self.node.label, f"is connected to {server.label}")
        self.connection = _Connection(self, server)
        self._transmit = self.connection.to_server.send
        self._came_up()

    def _soon(self, change: Callable[[], None]) -> None:
        def now() -> None:
            self._changing = False
            if self._state is not OutgoingState.CLOSED:
                change()
                # The connection may have been lost meanwhile in another way, for which there was no attempt then.
                self.check()

        self._changing = True
        delay_s = self.node.network.delay_s()
        asyncio.get_running_loop().call_later(delay_s, lambda: self.node.when_awake(now))


class _Connection:
    def __init__(self, client: _Outgoing, server: MemoryWire) -> None:
        self.server = server
        network = client.node.network
        self.to_server = Pipe(
            network,
            client.node,
            server,
            deliver=lambda frames: self._to_server(client, frames),
            ended=lambda: None,  # as a ROUTER, which is not notified either
        )
        self.to_client = Pipe(
            network,
            server,
            client.node,
            deliver=lambda frames: self._to_client(client, frames),
            ended=lambda: client.lost(self),
        )

    def _to_server(self, client: _Outgoing, frames: Frames) -> None:
        # As a ROUTER does, whose client is known by its later connection.
        if client.connection is None or client.connection is self:
            self.server.received_from(client, frames)

    def _to_client(self, client: _Outgoing, frames: Frames) -> None:
        if client.connection is self and client.state is not OutgoingState.CLOSED:
            client.arrived(frames)
