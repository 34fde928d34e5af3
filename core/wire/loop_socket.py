"""ZeroMQ sockets on the running asyncio loop, through their file descriptors.

``zmq.asyncio`` costs an order of magnitude more: here a socket's descriptor wakes the loop, and all messages that have
arrived are received at once. The descriptor is edge-triggered: a socket must be drained until it is empty, and be
checked again after every send, which may have consumed the edge (zmq_getsockopt(3), ZMQ_FD).
"""

import asyncio
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..protocol import codec

# Plain numbers: combining enum members, and looking them up, costs as much as sending.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
LINGER_MS = 500
# After this many messages other callbacks of the loop get their turn.
_DRAIN_BUDGET = 256
# From here on libzmq sends the bytes in place; below, its bookkeeping costs more than the copy.
_ZERO_COPY_BYTES = 64 * 2**10

Frames = list[codec.Bytes]


class LoopSocket:
    """A socket that delivers its messages by callback; sending never blocks the loop."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        deliver: Callable[[Frames], None],
        small_frames: int = 1,
        *,
        whole_first: bool = False,
    ) -> None:
        """``small_frames``: number of frames of each message that come before its raw buffers. ``whole_first``: the
        first one is delivered as a ``zmq.Frame``, which holds the properties of its connection."""
        self._receive = _receive_whole_first if whole_first else _receive_frames
        self.socket = socket
        self._deliver = deliver
        self._small_frames = small_frames
        self._loop = asyncio.get_running_loop()
        self._check_is_scheduled = False
        self._closed = False
        self._fd = socket.FD
        try:
            self._loop.add_reader(self._fd, self._readable)
        except BaseException:  # a loop in virtual time has no descriptors
            socket.close(linger=0)
            raise
        self._check_soon()

    def send(self, frames: Frames) -> None:
        """Does nothing after ``close``."""
        if self._closed:
            return
        try:
            _send_frames(self.socket, frames)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # A peer of a ROUTER has left: callers that wait for its answers notice its silence.
        self._check_soon()

    def drain(self) -> None:
        """Delivers all messages that have arrived."""
        while not self._closed and self._holds_messages():
            self._deliver(self._receive(self.socket, self._small_frames))

    @property
    def is_closed(self) -> bool:
        """True after ``close``."""
        return self._closed

    def _holds_messages(self) -> bool:
        events: int = self.socket.get(_EVENTS)  # type: ignore[assignment]  # pyzmq: int or bytes, by the option
        return events & _POLLIN != 0

    def _readable(self) -> None:
        """The first message is delivered at once, the others after the callbacks that it causes: most messages come one
        at a time. As a rule there is one, and asking for it costs as much as receiving it."""
        if self._closed:
            return
        try:
            frames = self._receive(self.socket, self._small_frames)
        except zmq.Again:
            pass
        else:
            self._deliver(frames)
        self._check_soon()

    def _check_soon(self) -> None:
        """The descriptor is edge-triggered, and sending and receiving may take its edge (zmq_getsockopt(3), ZMQ_FD)."""
        if not self._check_is_scheduled:
            self._check_is_scheduled = True
            self._loop.call_soon(self._check)

    def _check(self) -> None:
        self._check_is_scheduled = False
        self._drain()

    def _drain(self) -> None:
        if self._closed:
            return
        for _ in range(_DRAIN_BUDGET):
            if not self._holds_messages():
                break
            self._deliver(self._receive(self.socket, self._small_frames))
            if self.is_closed:  # a delivered message can cause that
                return
        else:
            self._check_soon()

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Can be repeated."""
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
    """A message; frames of raw buffers stay in the memory that libzmq received them into."""
    frames: Frames = []
    more = True
    while more:  # reading the flag of the frame is cheaper than asking the socket (ZMQ_RCVMORE)
        frame = socket.recv(_NOBLOCK, copy=False)
        more = frame.more
        if len(frames) <= small_frames + codec.MAX_BUFFERS:  # one too many is enough to be refused
            frames.append(frame.bytes if len(frames) < small_frames else frame.buffer)
    return frames


def _receive_whole_first(socket: "zmq.Socket[bytes]", small_frames: int) -> Frames:
    """A message of at least two frames, as every message of a ROUTER."""
    first: Any = socket.recv(_NOBLOCK, copy=False)
    return [first, *_receive_frames(socket, small_frames - 1)]


class ConnectionMonitor:
    """Reports the events of a DEALER's connection on the loop (zmq_socket_monitor(3))."""

    def __init__(self, dealer: "zmq.Socket[bytes]", events: int, on_event: Callable[[int], None]) -> None:
        """``events``: the mask of ``zmq.EVENT_*`` to report."""
        self._dealer = dealer
        self._on_event = on_event
        self._socket = LoopSocket(dealer.get_monitor_socket(events), self._deliver)

    def _deliver(self, frames: Frames) -> None:
        event = parse_monitor_message([bytes(frame) for frame in frames])
        self._on_event(int(event["event"]))

    def close(self) -> None:
        """Reports no more events. Can be repeated."""
        if not self._dealer.closed:
            self._dealer.disable_monitor()
        self._socket.close()
