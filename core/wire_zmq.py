"""ZeroMQ ROUTER/DEALER on the running loop, through the sockets' file descriptors.

``zmq.asyncio`` costs an order of magnitude; here a socket's descriptor wakes the loop and everything it holds
is received at once. The descriptor is edge-triggered: it must be drained until EAGAIN, and looked at again
after every send and receive (zmq_getsockopt(3), ZMQ_FD). What is sent to a peer within one tick of the loop
leaves joined in one message, so that a burst of calls reaches its actor as a burst.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import zmq

from . import codec
from .wire import Link, Receive

_LINGER_MS = 500
# After this many messages other callbacks of the loop get their turn.
_DRAIN_BUDGET = 256


class _Socket:
    """A socket whose messages are delivered by callback and whose sends never block the loop."""

    def __init__(self, socket: "zmq.Socket[bytes]", deliver: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._unsent: list[list[bytes]] = []
        self._look_again_scheduled = False
        self._closed = False
        self._loop.add_reader(socket.FD, self._drain)
        self._look_again()

    def send(self, frames: list[bytes]) -> None:
        self._unsent.append(frames)
        self._send_queued()
        self._look_again()

    def _send_queued(self) -> None:
        sent = 0
        try:
            for frames in self._unsent:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                sent += 1
        except zmq.Again:  # no peer yet: the descriptor wakes us when it can be written
            pass
        del self._unsent[:sent]

    def _look_again(self) -> None:
        if not self._look_again_scheduled:
            self._look_again_scheduled = True
            self._loop.call_soon(self._drain_soon)

    def _drain_soon(self) -> None:
        self._look_again_scheduled = False
        self._drain()

    def _drain(self) -> None:
        for _ in range(_DRAIN_BUDGET if not self._closed else 0):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._deliver(frames)
        else:
            if not self._closed:
                self._look_again()
        if self._unsent and not self._closed:
            self._send_queued()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.FD)
            self._socket.close(linger=_LINGER_MS)


class _ZmqLink:
    """A peer behind a socket; ``route`` is the identity frame that a ROUTER needs, a DEALER none."""

    def __init__(self, socket: _Socket, route: list[bytes], header: bytes) -> None:
        self._socket = socket
        self._prefix = [*route, header]
        self._queued: list[bytes] = []

    def send(self, envelope: bytes) -> None:
        if not self._queued:
            asyncio.get_running_loop().call_soon(self.flush)
        self._queued.append(envelope)

    def flush(self) -> None:
        if self._queued:
            queued, self._queued = self._queued, []
            self._socket.send([*self._prefix, codec.join(queued)])


class ZmqWire:
    """Listens on an ``ipc://`` address; one DEALER per peer that it connects to."""

    def __init__(self, address: str, name: str) -> None:
        self.address = address
        self._header = codec.pack_header(name)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: list[_Socket] = []
        self._outgoing: dict[str, _ZmqLink] = {}
        self._incoming: dict[bytes, _ZmqLink] = {}
        self._receive: Receive | None = None

    def start(self, receive: Receive) -> None:
        self._receive = receive
        self._context = zmq.Context()
        router = self._context.socket(zmq.ROUTER)
        router.set_hwm(0)
        router.bind(self.address)
        self._router = self._adopt(router, self._from_incoming)

    def connect(self, address: str) -> Link:
        link = self._outgoing.get(address)
        if link is None:
            assert self._context is not None, "the wire has not been started"
            dealer = self._context.socket(zmq.DEALER)
            dealer.set_hwm(0)
            dealer.connect(address)
            socket = self._adopt(dealer, lambda frames: self._hand_over(self._outgoing[address], frames))
            link = self._outgoing[address] = _ZmqLink(socket, [], self._header)
        return link

    def close(self) -> None:
        for link in (*self._outgoing.values(), *self._incoming.values()):
            link.flush()
        for socket in self._sockets:
            socket.close()
        if self._context is not None:
            self._context.term()
        if self.address.startswith("ipc://"):
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _adopt(self, socket: "zmq.Socket[bytes]", deliver: Callable[[list[bytes]], None]) -> _Socket:
        adopted = _Socket(socket, deliver)
        self._sockets.append(adopted)
        return adopted

    def _from_incoming(self, frames: list[bytes]) -> None:
        route = frames.pop(0)
        link = self._incoming.get(route)
        if link is None:
            link = self._incoming[route] = _ZmqLink(self._router, [route], self._header)
        self._hand_over(link, frames)

    def _hand_over(self, link: Link, frames: list[bytes]) -> None:
        assert self._receive is not None
        header, body = frames if len(frames) == 2 else (b"", b"")
        self._receive(link, header, body)
