"""The fastest design of calls over bare ZeroMQ under asyncio, measured beside ours by ``flexmarl bench calls``.

DEALER/ROUTER on the sockets' file descriptors under uvloop, as the pattern ``calls`` of ``bare_zeromq.py``, but the
messages of one tick of the loop are joined: the first leaves at once, the others together in one frame at its end. A
frame is a MessagePack array of messages that are packed already. A reply finds its future by call id. No validation,
deadline, credit or order of its own.

It is imported in measured processes: no large imports.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import msgpack
import zmq

# The most messages in one frame: the receiver begins with the first of a long burst while the rest is being packed.
_FRAME_MESSAGES = 256
_ARRAY_32 = struct.Struct("!BI")
_CALL, _TELL, _COUNT = range(3)


class JoinedSocket:
    """Sends messages, joined by ticks, and passes each frame that arrives to ``received``."""

    def __init__(self, socket: "zmq.Socket[bytes]", received: Callable[[list[bytes]], None]) -> None:
        self.route: list[bytes] = []
        """The frames that precede each message: a ROUTER's, of its peer."""
        self._socket = socket
        self._take_replies = received
        self._loop = asyncio.get_running_loop()
        self._in_tick = False
        self._queued: list[bytes] = []
        self._descriptor = socket.FD
        self._loop.add_reader(self._descriptor, self._drain)

    def send(self, packed: bytes) -> None:
        if not self._in_tick:
            self._in_tick = True
            self._loop.call_soon(self._end_tick)
            self._socket.send_multipart([*self.route, b"\x91" + packed], zmq.NOBLOCK)
            return
        self._queued.append(packed)
        if len(self._queued) == _FRAME_MESSAGES:
            self._flush()

    def _end_tick(self) -> None:
        self._in_tick = False
        self._flush()
        self._drain()  # the descriptor is edge-triggered: sending may have taken its edge (zmq_getsockopt(3), ZMQ_FD)

    def _flush(self) -> None:
        if self._queued:
            queued, self._queued = self._queued, []
            frame = b"".join((_ARRAY_32.pack(0xDD, len(queued)), *queued))
            self._socket.send_multipart([*self.route, frame], zmq.NOBLOCK)

    def _drain(self) -> None:
        try:
            while True:
                self._take_replies(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)


class JoinedCalls:
    """The calling side."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._loop = asyncio.get_running_loop()
        self._pack = msgpack.Packer().pack
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._last_id = 0
        self._socket = JoinedSocket(socket, self._take_replies)
        self.close = self._socket.close

    def call(self) -> asyncio.Future[Any]:
        """An empty call; it has the content of one of ours."""
        return self._request([_CALL, self._next_id(), "echo", "empty", 30.0, [], {}])

    def tell(self, number: int) -> None:
        self._socket.send(self._pack([_TELL, self._next_id(), "echo", "hear", 30.0, [number], {}]))

    def told(self) -> asyncio.Future[Any]:
        """The number of messages without a reply that have arrived."""
        return self._request([_COUNT, self._next_id(), "echo", "heard", 30.0, [], {}])

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _request(self, message: list[Any]) -> asyncio.Future[Any]:
        reply = self._replies[message[1]] = self._loop.create_future()
        self._socket.send(self._pack(message))
        return reply

    def _take_replies(self, frames: list[bytes]) -> None:
        for call_id, value in msgpack.unpackb(frames[0]):
            reply = self._replies.pop(call_id)
            if not reply.done():  # else its caller was cancelled
                reply.set_result(value)


async def serve(socket: "zmq.Socket[bytes]") -> None:
    """Replies to the calls of one peer, until this process ends."""
    pack = msgpack.Packer().pack
    told = 0

    def answer(frames: list[bytes]) -> None:
        nonlocal told
        joined.route = frames[:1]
        for kind, call_id, _actor, _endpoint, _timeout_s, _arguments, _keywords in msgpack.unpackb(frames[1]):
            if kind == _TELL:
                told += 1
            else:
                joined.send(pack([call_id, told if kind == _COUNT else None]))

    joined = JoinedSocket(socket, answer)
    await asyncio.Event().wait()
