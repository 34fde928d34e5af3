"""ZeroMQ ROUTER/DEALER on the running loop.

A wire binds one ROUTER and connects one DEALER per peer. The DEALER's monitor reports within milliseconds when the
connection comes up and goes down. Messages are given to libzmq only while it is up, and the DEALER is closed with it:
messages that have not left when a peer dies are not delivered to its successor. (ZMQ_IMMEDIATE would do that too, but
it drops the messages that the peer had sent and that were not read yet.)
"""

import asyncio
import errno
import functools
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import zmq

from ..protocol.incarnations import new_epoch
from ..telemetry import get_logger
from . import descriptors
from .curve import Gate, Keys, check_plain_tcp, protect_client, protect_server
from .links import LinkTable, OutgoingEvent, OutgoingLink, OutgoingState
from .loop_socket import LINGER_MS, ConnectionMonitor, Frames, LoopSocket
from .permissions import DEFAULT_CALLS, may_call
from .wire import Link, Listener

# Two per peer. libzmq's default limit is 1023; each possible socket costs it eight bytes.
_MAX_SOCKETS = 2**16
# After so many new connections of peers the file descriptors are counted.
_CHECKED_CONNECTIONS = 32
# Callers that connect to a listening socket before its process takes them.
_WAITING_CONNECTIONS = 512
_RECONNECT_MS = 20
# Ten times the linger time of the sockets.
_TERM_S = 10 * LINGER_MS / 1000
_RECONNECT_MAX_MS = 500
# libzmq ends the connection of a peer that announces a larger frame, before it allocates memory.
MAX_FRAME_BYTES = 8 * 2**30

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

Dealer: TypeAlias = "zmq.Socket[bytes]"
log = get_logger(__name__)


# Of an address that is another host's, and of a name that does not resolve.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.ENODEV)


@dataclass(frozen=True, slots=True)
class Tcp:
    """An address at which a system listens for peers on other hosts. With port 0 the kernel takes a free one.

        async with ActorSystem("service", tcp=Tcp("0.0.0.0", 7000, advertise="host-3")) as system:
            print(system.address, system.keys.server_public)      # what a client needs: see ``Keys``

    Connections are encrypted and only clients of the keys' allow-list are admitted; if ``keys`` is None, the system
    makes new ones. ``plain`` does without: on loopback, or beyond it by ``plain_beyond_loopback``, for networks
    where every machine is trusted. ``advertise``: the host name that peers use, if ``host`` is ``*`` or ``0.0.0.0``.
    Raises ValueError if the port is invalid or peers could not connect.
    """

    host: str = "127.0.0.1"
    port: int = 0
    keys: Keys | None = None
    plain: bool = False
    plain_beyond_loopback: bool = False
    advertise: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"invalid port {self.port}: use 0 to 65535")
        check_advertised(self.host, self.advertise)


def check_advertised(host: str, advertise: str | None) -> None:
    """Raises ValueError if ``host`` means every address of this machine, which no peer can connect to, and
    ``advertise`` does not name one."""
    if host in ("", "*", "0.0.0.0", "::") and advertise is None:
        raise ValueError(f"peers can't connect to {host!r}: name the host that they use, by advertise=")


def ipc_address(directory: Path, name: str) -> str:
    """The address of the system ``name`` that listens on a socket in ``directory``."""
    return f"ipc://{directory / name}.sock"


def _socket_path(ipc_address: str) -> str:
    return ipc_address.removeprefix("ipc://")


def remove_socket(ipc_address: str) -> None:
    """Removes the socket's file, which a killed process leaves behind. Raises OSError if it is there and can't be
    removed."""
    Path(_socket_path(ipc_address)).unlink(missing_ok=True)


def listening_socket(tcp: Tcp) -> socket.socket:
    """A socket that listens as ``tcp`` says, to be given to a ``ZmqWire``. Raises OSError."""
    host = {"*": "0.0.0.0", "::": "::"}.get(tcp.host, tcp.host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, tcp.port), family=family, backlog=_WAITING_CONNECTIONS)
    listening.setblocking(False)  # libzmq expects it
    return listening


def tcp_address(tcp: Tcp, port: int) -> str:
    """The address that peers use for a system that listens as ``tcp`` says."""
    return f"tcp://{bracket_ipv6(tcp.advertise or tcp.host)}:{port}"


class _Outgoing(OutgoingLink):
    """A link to a peer, over a DEALER and its monitor."""

    def __init__(self, listener: Listener, address: str, header: bytes, make: Callable[[], Dealer]) -> None:
        """``make``: gives a socket that is not connected yet. Raises OSError."""
        super().__init__(listener, address, header)
        self._make = make
        self._monitor: ConnectionMonitor | None = None
        # The same for all of its sockets, so that answers under way still arrive after a reconnect.
        self._routing_id = b"F" + os.urandom(8)
        self._connect()

    def _connect(self) -> None:
        """Raises OSError."""
        dealer, address = self._make(), self.link.address
        self._socket = LoopSocket(dealer, self.arrived)
        self._transmit = self._socket.send
        try:
            # The monitor comes before the connection: no event may be missed.
            self._monitor = ConnectionMonitor(dealer, _EVENTS, self._event)
            dealer.set(zmq.ROUTING_ID, self._routing_id)
            dealer.connect(address)
        except zmq.ZMQError as error:
            self._socket.close(linger_ms=0)
            if self._monitor is not None:
                self._monitor.close()
            raise OSError(error.errno, f"can't connect to {address!r}: {error.strerror}") from error

    def _open(self) -> None:
        try:
            self._connect()
        except OSError as error:
            self._move(OutgoingEvent.REFUSED)
            asyncio.get_running_loop().call_soon(self._listener.refused, self.link, str(error))

    def _event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.link.trouble = ""
            if self._state is OutgoingState.CONNECTING:  # else a message has overtaken this event
                self._came_up()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self.link.trouble = "the handshake fails; has it got other keys, or none?"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._report_refusal("it does not admit this side's key")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._report_refusal("it is secured in another way than this side, or speaks no ZMTP")
        elif self._state is OutgoingState.UP:
            self._socket.drain()  # the messages that it sent before it left; one of them may have closed the link
            if self._state is OutgoingState.UP:
                self._lose("its process ended or closed the connection")

    def _report_refusal(self, reason: str) -> None:
        # libzmq would never try this peer again. This side does when there is a message to send: by then the peer may
        # admit it.
        self._disconnect()
        self._move(OutgoingEvent.REFUSED)
        self._listener.refused(self.link, reason)

    def close(self) -> None:
        if self._socket.is_closed:
            self.link.forget_unsent()
        else:
            self.link.flush()
            self._disconnect(LINGER_MS)
        self._move(OutgoingEvent.CLOSED)

    def _disconnect(self, linger_ms: int = 0) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close(linger_ms)


class ZmqWire:
    """Listens on ``ipc://PATH`` or ``tcp://HOST:PORT``."""

    def __init__(
        self,
        listen: str | Tcp,
        keys: Keys | None = None,
        epoch: int | None = None,
        listening: socket.socket | None = None,
    ) -> None:
        """``listen``: an ipc address or a ``Tcp``; ``keys``: for listening on and connecting to TCP; ``epoch``: None
        begins a lineage. ``listening``: a ``listening_socket``, which the wire takes over and closes."""
        self._listen = listen
        self._keys = keys
        self._listening = listening
        self.address = (
            listen if isinstance(listen, str) else f"tcp://{bracket_ipv6(listen.host)}:{listen.port}"
        )
        self.epoch = new_epoch() if epoch is None else epoch
        # Not the loop's: uvloop's clock is that of its last look for events. Nor CLOCK_MONOTONIC, which stands still
        # while the machine is suspended: a lease would outlive the patience of its peer. Asked for each request, and so
        # without a method of Python around it.
        self.now = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)
        self.wall = time.time
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._gate: Gate | None = None
        self._router: LoopSocket | None = None
        self._links: LinkTable[_Outgoing, bytes] = LinkTable()

    def start(self, header: bytes, listener: Listener) -> None:
        """See ``Wire.start``. Raises OSError too if file descriptors are missing, PlainTcpRefused, InvalidKeys."""
        self._header = header
        self.listener = listener
        descriptors.raise_limit()
        descriptors.check_room(descriptors.FOR_A_WIRE, f"to listen on {self.address}")
        # Not ``Context.instance()``: a service that embeds this may use that one, and a context has one gate.
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        try:
            self._bind(self._context)
        except BaseException:
            self.close()
            raise

    def _bind(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        router = context.socket(zmq.ROUTER)
        try:
            # No high-water mark: at one a socket drops messages, or blocks. Credit bounds them, and lets senders wait.
            router.set_hwm(0)
            # Else a message to a peer that has left is dropped as if it had been sent.
            router.set(zmq.ROUTER_MANDATORY, 1)
            # A peer that connects again has the routing id of before. Without this its new connection would be refused
            # for as long as the end of the old one is not noticed.
            router.set(zmq.ROUTER_HANDOVER, 1)
            router.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            if isinstance(self._listen, Tcp):
                self._bind_tcp(context, router, self._listen)
            else:
                _refuse_to_steal(self._listen)
                router.bind(self._listen)
        except zmq.ZMQError as error:
            router.close(linger=0)
            hint = ": only an address of this host is possible" if error.errno in _NOT_HERE else ""
            raise OSError(error.errno, f"can't listen on {self.address}: {error.strerror}{hint}") from error
        except BaseException:
            router.close(linger=0)
            raise
        gated = self._gate is not None
        receive = self._from_client if gated else self._from_incoming
        # The route comes first.
        self._router = LoopSocket(router, receive, small_frames=2, whole_first=gated)

    def _bind_tcp(
        self, context: "zmq.Context[zmq.Socket[bytes]]", router: "zmq.Socket[bytes]", tcp: Tcp
    ) -> None:
        keys = None if tcp.plain else self._keys
        check_plain_tcp(tcp.host, secured=keys is not None, beyond_loopback=tcp.plain_beyond_loopback)
        if keys is not None:
            # Before the socket binds: a client that comes before the gate answers would be refused.
            self._gate = Gate(context, keys.allowed)
            self._gate.start()
            protect_server(router, keys)
        router.set(zmq.IPV6, int(":" in tcp.host))
        if self._listening is not None:
            # Detached: libzmq closes it. A second close would hit a socket that has got the number meanwhile.
            router.set(zmq.USE_FD, self._listening.detach())
        router.bind(self.address)
        bound: bytes = router.get(zmq.LAST_ENDPOINT)  # type: ignore[assignment]  # as above
        self.address = tcp_address(tcp, int(bound.decode().rstrip(chr(0)).rpartition(":")[2]))

    def first_epoch(self, actor: str) -> int:
        """See ``Wire.first_epoch``: each actor begins a lineage of its own."""
        return new_epoch()

    def connect(self, address: str) -> Link:
        """See ``Wire.connect``. Raises OSError, PlainTcpRefused."""
        outgoing = self._links.outgoing.get(address)
        if outgoing is None:
            make = functools.partial(self._make_dealer, address)
            outgoing = self._links.outgoing[address] = _Outgoing(self.listener, address, self._header, make)
        return outgoing.link

    def _make_dealer(self, address: str) -> Dealer:
        """A socket for connecting to ``address``. Raises PlainTcpRefused if that needs keys, OSError."""
        assert self._context is not None, "the wire has not been started"
        keys = None
        if address.startswith("tcp://"):
            keys, may_be_plain = self._keys, False
            if isinstance(self._listen, Tcp):
                keys = None if self._listen.plain else keys
                may_be_plain = self._listen.plain_beyond_loopback
            host = address.removeprefix("tcp://").rpartition(":")[0]
            check_plain_tcp(host, secured=keys is not None, beyond_loopback=may_be_plain)
        descriptors.check_room(descriptors.FOR_A_CONNECTION, f"to connect to {address}")
        try:
            dealer = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"no socket to connect to {address!r}: {error.strerror}") from error
        dealer.set_hwm(0)
        dealer.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        dealer.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        dealer.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        dealer.set(zmq.IPV6, int("[" in address))
        if keys is not None:
            protect_client(dealer, keys)
        return dealer

    def allow(self, keys: Keys) -> None:
        """Admits the clients of ``keys`` from now on, for the calls that it allows them; does nothing on a wire without
        keys."""
        if self._gate is not None:
            self._keys = keys
            for public_key in keys.allowed:
                self._gate.allow(public_key)

    def disconnect(self, link: Link) -> None:
        """See ``Wire.disconnect``."""
        self._links.disconnect(link)

    def close(self) -> None:
        """See ``Wire.close``. Waits for libzmq's threads, at most 5 s. Can be repeated."""
        self._links.close()
        if self._router is not None:
            self._router.close()
        if self._listening is not None:  # libzmq has not got it
            self._listening.close()
        if self._gate is not None:
            self._gate.close()
        if self._context is not None:
            _terminate(self._context, self.address)
        if self._router is not None and self.address.startswith("ipc://"):
            remove_socket(self.address)

    def _from_incoming(self, frames: Frames) -> None:
        route = bytes(frames[0])
        link = self._links.incoming.get(route) or self._new_link(route)
        self.listener.received(link, frames[1], frames[2:])

    def _from_client(self, frames: Frames) -> None:
        """As ``_from_incoming``, for clients that the gate has admitted."""
        first: Any = frames[0]
        frames[0] = route = first.bytes
        if route not in self._links.incoming:
            try:
                client = str(first.get("User-Id"))  # the gate's answer about this connection
            except zmq.ZMQError:
                client = ""
            assert self._keys is not None, "a gate has keys"
            if client != self._keys.client_public:
                self._new_link(route).may_call = functools.partial(self._may_call, client)
        self._from_incoming(frames)

    def _may_call(self, client: str, actor: str, endpoint: str) -> bool:
        assert self._keys is not None, "a gate has keys"
        return client in self._keys.allowed and may_call(
            self._keys.calls.get(client, DEFAULT_CALLS), actor, endpoint
        )

    def _new_link(self, route: bytes) -> Link:
        router = self._router
        assert router is not None
        link = Link(f"a peer at {self.address}", self._header, lambda out: router.send([route, *out]))
        self._links.incoming[route] = link
        if len(self._links.incoming) % _CHECKED_CONNECTIONS == 0:
            descriptors.warn_if_scarce()
        return link


def _terminate(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
    """Ends libzmq's threads, when they have sent what they had. It has been seen that they wait for ever, with all
    sockets closed and past their linger times: then they are left alone."""
    ending = threading.Thread(target=context.term, name=f"end of {address}", daemon=True)
    ending.start()
    ending.join(_TERM_S)
    if ending.is_alive():
        log.warning("ZeroMQ does not end: its threads are left alone", address=address, after_s=_TERM_S)


def _refuse_to_steal(address: str) -> None:
    """Raises OSError if another socket listens on ``address``: libzmq would take the address away from it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(_socket_path(address))
        except OSError:  # the file does not exist, or a killed process has left it
            return
    raise OSError(errno.EADDRINUSE, f"can't listen on {address}: another system does")


def bracket_ipv6(name: str) -> str:
    """The host ``name`` as it stands before a port: an IPv6 address has colons of its own."""
    return f"[{name}]" if ":" in name else name
