"""ZeroMQ ROUTER/DEALER on the running loop, through the sockets' file descriptors.

``zmq.asyncio`` costs an order of magnitude; here a socket's descriptor wakes the loop and everything it holds
is received at once. The descriptor is edge-triggered: a socket must be drained until it holds nothing, and be looked at
again after every send, which may have taken the edge away (zmq_getsockopt(3), ZMQ_FD).

A wire binds one ROUTER and connects one DEALER per peer, whose monitor tells within milliseconds when the connection
comes and goes. libzmq is handed messages only while it stands, and the DEALER ends with it: what has not left when a
peer dies is not delivered to its successor. (ZMQ_IMMEDIATE would do that too, and drop what the peer had sent and
nobody has read yet.)
"""

import asyncio
import errno
import functools
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..protocol import codec
from ..telemetry import get_logger
from .curve import Gate, GateStatistics, Keys, check_plain_tcp, protect_client, protect_server
from .wire import Link, Listener

log = get_logger(__name__)

# Plain numbers: to combine enum members costs as much as to send.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LINGER_MS = 500
# Two per peer. libzmq would end at 1023; each that is possible takes it eight bytes.
_MAX_SOCKETS = 2**16
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 500
# After this many messages other callbacks of the loop get their turn.
_DRAIN_BUDGET = 256
# libzmq ends the connection of a peer that announces a larger frame, before it makes room for it.
MAX_FRAME_BYTES = 8 * 2**30
# From here on libzmq sends from where the bytes are; below, its bookkeeping costs more than the copy.
_ZERO_COPY_BYTES = 64 * 2**10

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

Frames = list[codec.Bytes]
Dealer: TypeAlias = "zmq.Socket[bytes]"


@dataclass(frozen=True, slots=True)
class Tcp:
    """Where to listen for peers on other hosts. Port 0 takes any free one.

    Connections are encrypted and only clients of the keys' allow-list get in; where ``keys`` is None, a run's first
    system makes them. ``plain`` does without: on loopback, or beyond it by ``plain_beyond_loopback``, for networks
    where every machine is trusted. ``advertise``: the host name that peers use, where ``host`` is ``*`` or ``0.0.0.0``.
    Raises ValueError where peers could not connect.
    """

    host: str = "127.0.0.1"
    port: int = 0
    keys: Keys | None = None
    plain: bool = False
    plain_beyond_loopback: bool = False
    advertise: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port {self.port} is none: 0 to 65535")
        if self.host in ("*", "0.0.0.0", "::") and self.advertise is None:
            raise ValueError(
                f"peers can't connect to {self.host!r}: say which host name they use, by advertise="
            )


def ipc_address(directory: Path, name: str) -> str:
    return f"ipc://{directory / name}.sock"


class _Socket:
    """A socket whose messages are delivered by callback and whose sends never block the loop."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", deliver: Callable[[Frames], None], small_frames: int = 2
    ) -> None:
        """``small_frames``: how many frames begin each message before its raw buffers do."""
        self.socket = socket
        self._deliver = deliver
        self._small_frames = small_frames
        self._loop = asyncio.get_running_loop()
        self._look_again_scheduled = False
        self._closed = False
        self._fd = socket.FD
        try:
            self._loop.add_reader(self._fd, self._drain)
        except BaseException:  # a loop in virtual time has no descriptors
            socket.close(linger=0)
            raise
        self._look_again()

    def send(self, frames: Frames) -> None:
        if self._closed:
            return
        try:
            _send_frames(self.socket, frames)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # A peer of a ROUTER that has left: whoever waits for its answers finds out by its silence.
        if self._holds_messages():
            self._look_again()

    def drain(self) -> None:
        """Delivers everything that is there."""
        while not self._closed and self._holds_messages():
            self._deliver(_receive_frames(self.socket, self._small_frames))

    @property
    def is_closed(self) -> bool:
        return self._closed

    def _holds_messages(self) -> bool:
        events: int = self.socket.get(zmq.EVENTS)  # type: ignore[assignment]  # pyzmq: int or bytes, by the option
        return events & zmq.POLLIN != 0

    def _look_again(self) -> None:
        if not self._look_again_scheduled:
            self._look_again_scheduled = True
            self._loop.call_soon(self._drain_soon)

    def _drain_soon(self) -> None:
        self._look_again_scheduled = False
        self._drain()

    def _drain(self) -> None:
        if self._closed:
            return
        for _ in range(_DRAIN_BUDGET):
            if not self._holds_messages():
                break
            self._deliver(_receive_frames(self.socket, self._small_frames))
            if self.is_closed:  # by what the message caused
                return
        else:
            self._look_again()

    def close(self, linger_ms: int = _LINGER_MS) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self.socket.close(linger=linger_ms)


def _send_frames(socket: "zmq.Socket[bytes]", frames: Frames) -> None:
    """Never blocks: the queues have no high-water mark, credit bounds them."""
    last = frames[-1]
    for frame in frames[:-1]:
        socket.send(frame, _NOBLOCK_MORE, copy=len(frame) < _ZERO_COPY_BYTES)
    socket.send(last, _NOBLOCK, copy=len(last) < _ZERO_COPY_BYTES)


def _receive_frames(socket: "zmq.Socket[bytes]", small_frames: int) -> Frames:
    """A message; frames that hold raw buffers stay where libzmq has received them."""
    frames: Frames = []
    more = True
    while more:  # asking the frame is cheaper than asking the socket (ZMQ_RCVMORE)
        frame = socket.recv(_NOBLOCK, copy=False)
        more = frame.more
        if len(frames) <= small_frames + codec.MAX_BUFFERS:  # one too many is enough to be refused
            frames.append(frame.bytes if len(frames) < small_frames else frame.buffer)
    return frames


class _Monitor:
    """What libzmq reports of a DEALER's connection, told on the loop."""

    def __init__(self, dealer: "zmq.Socket[bytes]", tell: Callable[[int], None]) -> None:
        self._dealer = dealer
        self._tell = tell
        self._socket = _Socket(dealer.get_monitor_socket(_EVENTS), self._deliver)

    def _deliver(self, frames: Frames) -> None:
        event = parse_monitor_message([bytes(frame) for frame in frames])
        self._tell(int(event["event"]))

    def close(self) -> None:
        if not self._dealer.closed:
            self._dealer.disable_monitor()
        self._socket.close()


class _Outgoing:
    """A link to a peer, over a DEALER and its monitor."""

    def __init__(self, listener: Listener, address: str, header: bytes, make: Callable[[], Dealer]) -> None:
        """``make``: gives a socket that is not connected yet. Raises OSError."""
        self._listener = listener
        self._make = make
        self._up = False
        self._ended = False
        self._monitor: _Monitor | None = None
        self._unsent: list[Frames] = []
        # The same for all of its sockets, so that answers which are under way find their way.
        self._routing_id = b"F" + os.urandom(8)
        self.link = Link(address, header, self._send, self._unsent.clear, self._begin_anew)
        self._open()

    def _open(self) -> None:
        dealer, address = self._make(), self.link.address
        self._socket = _Socket(dealer, self._received)
        try:
            self._monitor = _Monitor(dealer, self._event)  # before it connects: no event may be missed
            dealer.set(zmq.ROUTING_ID, self._routing_id)
            dealer.connect(address)
        except zmq.ZMQError as error:
            self._socket.close(linger_ms=0)
            if self._monitor is not None:
                self._monitor.close()
            raise OSError(error.errno, f"can't connect to {address!r}: {error.strerror}") from error

    def _reopen(self) -> None:
        try:
            self._open()
        except OSError as error:
            asyncio.get_running_loop().call_soon(self._listener.refused, self.link, str(error))

    def _send(self, frames: Frames) -> None:
        if self._up:
            self._socket.send(frames)
            return
        if self._ended:
            return
        self._unsent.append(frames)
        if self._socket.is_closed:
            self._reopen()

    def _received(self, frames: Frames) -> None:
        _hand_over(self._listener, self.link, frames)

    def _event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.link.trouble = ""
            self._listener.connected(self.link)  # what it repeats goes behind what waits here
            self._up = True
            unsent, self._unsent[:] = self._unsent[:], ()
            for frames in unsent:
                self._socket.send(frames)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self.link.trouble = "the handshake fails; has it got other keys, or none?"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._refused("it does not admit this side's key")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._refused("it is secured in another way than this side, or speaks no ZMTP")
        elif self._up:
            self._lost()

    def _lost(self) -> None:
        self._socket.drain()  # what it sent before it left
        if not self._socket.is_closed:  # by what that caused
            self._begin_anew()
            self._listener.disconnected(self.link, "its process ended or closed the connection")

    def _begin_anew(self) -> None:
        self._up = False
        self._close_sockets(linger_ms=0)
        self.link.forget_unsent()
        self._reopen()

    def _refused(self, reason: str) -> None:
        # libzmq would never try this peer again. We do, when there is something to send: it may have been told to
        # admit this side.
        self._up = False
        self._close_sockets(linger_ms=0)
        self._listener.refused(self.link, reason)

    def close(self) -> None:
        if self._socket.is_closed:
            self.link.forget_unsent()
        else:
            self.link.flush()
            self._close_sockets(_LINGER_MS)
        self._ended = True

    def _close_sockets(self, linger_ms: int) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close(linger_ms)


class ZmqWire:
    """Listens on ``ipc://PATH`` or ``tcp://HOST:PORT``."""

    def __init__(self, listen: str | Tcp, keys: Keys | None = None) -> None:
        """``listen``: an ipc address, or what a Tcp says; ``keys``: for listening on and connecting to TCP."""
        self._listen = listen
        self._keys = keys
        self.address = listen if isinstance(listen, str) else f"tcp://{_host(listen.host)}:{listen.port}"
        self.epoch = time.time_ns()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._gate: Gate | None = None
        self._router: _Socket | None = None
        self._outgoing: dict[str, _Outgoing] = {}
        self._incoming: dict[bytes, Link] = {}

    def start(self, header: bytes, listener: Listener) -> None:
        self._header = header
        self.listener = listener
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
            router.set_hwm(0)
            router.set(zmq.ROUTER_MANDATORY, 1)
            router.set(zmq.ROUTER_HANDOVER, 1)
            router.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            if isinstance(self._listen, Tcp):
                self._bind_tcp(context, router, self._listen)
            else:
                _refuse_to_steal(self._listen)
                router.bind(self._listen)
        except zmq.ZMQError as error:
            router.close(linger=0)
            raise OSError(error.errno, f"can't listen on {self.address}: {error.strerror}") from error
        except BaseException:
            router.close(linger=0)
            raise
        self._router = _Socket(router, self._from_incoming, small_frames=3)  # the route comes first

    def _bind_tcp(
        self, context: "zmq.Context[zmq.Socket[bytes]]", router: "zmq.Socket[bytes]", tcp: Tcp
    ) -> None:
        keys = None if tcp.plain else self._keys
        check_plain_tcp(tcp.host, secured=keys is not None, beyond_loopback=tcp.plain_beyond_loopback)
        if keys is not None:
            self._gate = Gate(context, keys.allowed)
            self._gate.start()
            protect_server(router, keys)
        router.set(zmq.IPV6, int(":" in tcp.host))
        router.bind(self.address)
        bound: bytes = router.get(zmq.LAST_ENDPOINT)  # type: ignore[assignment]  # as above
        host = _host(tcp.advertise or tcp.host)
        self.address = f"tcp://{host}:{bound.decode().rstrip(chr(0)).rpartition(':')[2]}"

    def connect(self, address: str) -> Link:
        known = self._outgoing.get(address)
        if known is None:
            make = functools.partial(self._make_dealer, address)
            known = self._outgoing[address] = _Outgoing(self.listener, address, self._header, make)
        return known.link

    def _make_dealer(self, address: str) -> Dealer:
        """For connecting to ``address``. Raises PlainTcpRefused where it may only be reached with keys."""
        assert self._context is not None, "the wire has not been started"
        keys = None
        if address.startswith("tcp://"):
            keys, may_be_plain = self._keys, False
            if isinstance(self._listen, Tcp):
                keys = None if self._listen.plain else keys
                may_be_plain = self._listen.plain_beyond_loopback
            host = address.removeprefix("tcp://").rpartition(":")[0]
            check_plain_tcp(host, secured=keys is not None, beyond_loopback=may_be_plain)
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

    def allow(self, public_key: str) -> None:
        """Lets in one more client from now on. Raises InvalidKeys; nothing to be allowed where all are."""
        if self._gate is not None:
            self._gate.allow(public_key)

    def clients(self) -> GateStatistics | None:
        """None where nobody is asked for a key."""
        return None if self._gate is None else self._gate.statistics()

    def disconnect(self, link: Link) -> None:
        outgoing = self._outgoing.get(link.address)
        if outgoing is not None and outgoing.link is link:
            del self._outgoing[link.address]
            outgoing.close()
        else:
            self._incoming = {route: known for route, known in self._incoming.items() if known is not link}

    def close(self) -> None:
        for link in self._incoming.values():
            link.flush()
        for outgoing in self._outgoing.values():
            outgoing.close()
        self._outgoing.clear()
        if self._router is not None:
            self._router.close()
        if self._gate is not None:
            self._gate.close()
        if self._context is not None:
            self._context.term()
        if self._router is not None and self.address.startswith("ipc://"):
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _from_incoming(self, frames: Frames) -> None:
        route = bytes(frames[0])
        link = self._incoming.get(route)
        if link is None:
            router = self._router
            assert router is not None
            link = Link(f"a peer at {self.address}", self._header, lambda out: router.send([route, *out]))
            self._incoming[route] = link
        _hand_over(self.listener, link, frames[1:])


def _refuse_to_steal(address: str) -> None:
    """libzmq takes an ipc address away from whoever listens there. Raises OSError where somebody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(address.removeprefix("ipc://"))
        except OSError:  # nobody: no such file, or one that a killed process has left
            return
    raise OSError(errno.EADDRINUSE, f"can't listen on {address}: another system does")


def _hand_over(listener: Listener, link: Link, frames: Frames) -> None:
    if len(frames) >= 2:
        listener.received(link, frames[0], frames[1], frames[2:])
    else:
        listener.received(link, b"", b"", [])


def _host(name: str) -> str:
    return f"[{name}]" if ":" in name else name
