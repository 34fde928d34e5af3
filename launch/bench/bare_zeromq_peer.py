"""Peer process of the bare ZeroMQ patterns (``bare_zeromq.py``), ``python -m flexmarl.launch.bench.bare_zeromq_peer``.

Standard input carries one line of JSON (pattern, address, secret key for CURVE, size of the array) and then stays
open for as long as the parent lives; standard output carries one line, the address that the socket is bound to.
"""

import asyncio
import json
import os
import sys
import threading
from typing import NoReturn

import msgpack
import uvloop
import zmq

from .joined_zeromq import serve as serve_joined


def main() -> None:
    init = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pattern = init["pattern"]
    # The buffer is written to before the first transfer: copying onto pages that do not exist yet is far slower.
    buffer = bytearray(b"\1") * init["array_bytes"]
    socket = zmq.Context().socket(zmq.ROUTER if pattern in ("calls", "joined") else zmq.REP)
    socket.set_hwm(0)
    if init["secret_key"] is not None:
        socket.curve_server = True
        socket.curve_secretkey = init["secret_key"].encode()
    socket.bind(init["address"])
    print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)  # noqa: T201  # the parent reads it
    if pattern == "latency":
        _echo(socket)
    elif pattern == "array":
        _take_arrays(socket, buffer)
    else:
        uvloop.run(serve_joined(socket) if pattern == "joined" else _Router(socket).serve())


def reply_to(message: bytes) -> bytes:
    _kind, call_id, _actor, _endpoint, _timeout_s, arguments, _keywords = msgpack.unpackb(message)
    packed: bytes = msgpack.packb([call_id, arguments[0] if arguments else None])
    return packed


def _echo(socket: "zmq.Socket[bytes]") -> NoReturn:
    while True:
        socket.send(reply_to(socket.recv()))


def _take_arrays(socket: "zmq.Socket[bytes]", buffer: bytearray) -> NoReturn:
    view = memoryview(buffer)
    while True:
        # Measured over ipc: steadier than recv_into, and never slower.
        frame = socket.recv(copy=False)
        arrived = len(frame)
        view[:arrived] = frame.buffer
        del frame  # frees its memory before the next one arrives
        socket.send(view[arrived - 1 : arrived])


class _Router:
    """Replies to calls through the socket's descriptor; see ``bare_zeromq.py``, ``calls``."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    async def serve(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket.FD, self._drain)
        self._drain()
        await asyncio.Event().wait()  # until the parent ends this process

    def _drain(self) -> None:
        receive, send = self._socket.recv_multipart, self._socket.send_multipart
        try:
            # Until EAGAIN: then no edge of the descriptor was missed.
            while True:
                identity, message = receive(zmq.NOBLOCK)
                send((identity, reply_to(message)), zmq.NOBLOCK)
        except zmq.Again:
            return


def _end_with_parent() -> NoReturn:
    """Ends the process with its parent. Runs in a thread of its own, because the sockets block."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(0)


if __name__ == "__main__":
    main()
