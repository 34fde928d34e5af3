"""Bare ZeroMQ patterns, measured beside our calls by ``flexmarl bench calls``: the limits of the sockets.

Two processes: this one and ``bare_zeromq_peer.py``, one peer per pattern; only the measured one is busy. Messages are
MessagePack arrays with the content of one of our calls (id, actor, endpoint, deadline, arguments), and so of about the
same size; packed and unpacked on both sides, without validation.

``latency``   REQ/REP, blocking sockets, no event loop: the shortest round trip of ZeroMQ.
``calls``     DEALER/ROUTER on the sockets' file descriptors under uvloop on both sides: a reply finds its future by
              call id, the descriptor is drained until EAGAIN, sends are direct and do not block. One ZeroMQ message
              per call; calls are not joined.
``joined``    the fastest design under asyncio: see ``joined_zeromq.py``.
``array``     REQ/REP, blocking: ``send(array, copy=False)``; the peer copies the message into a buffer that it
              prepared (faulted in) before, and acknowledges.

Over TCP all are encrypted with CURVE, with keys made for this measurement. The peer has no list of allowed
clients (no ZAP): that would slow the handshake, not the calls.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgpack
import numpy as np
import zmq

from ...core.base.threads import in_thread
from ..errors import BenchmarkFailed
from .joined_zeromq import JoinedCalls
from .measure import ONE_WAY_BURST, calls_in_flight, one_after_another_blocking, one_way

Pattern = Literal["latency", "calls", "joined", "array"]

_PATIENCE_S = 30.0


class Bare:
    """The given ``patterns`` over ipc, or over TCP with CURVE, ready to be measured."""

    def __init__(
        self,
        directory: Path,
        patterns: tuple[Pattern, ...],
        *,
        curve: bool,
        environment: Mapping[str, str],
        array_bytes: int = 0,
    ) -> None:
        """``directory``: private, for the sockets. ``environment``: the peers'. ``array_bytes``: the buffer's size."""
        self._directory = directory
        self._patterns = patterns
        self._curve = curve
        self._environment = dict(environment)
        self._array_bytes = array_bytes
        self._sockets: dict[Pattern, zmq.Socket[bytes]] = {}
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as resources:
            context = zmq.Context()
            resources.callback(context.destroy, linger=0)
            for pattern in self._patterns:
                await self._connect(context, pattern, resources)
            if "calls" in self._patterns:
                self._calls = _CallsById(self._sockets["calls"])
                resources.callback(self._calls.close)
            if "joined" in self._patterns:
                self.joined = JoinedCalls(self._sockets["joined"])
                resources.callback(self.joined.close)
            self._resources = resources.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._resources.aclose()

    async def _connect(
        self, context: "zmq.Context[zmq.Socket[bytes]]", pattern: Pattern, resources: AsyncExitStack
    ) -> None:
        own_public, own_secret = zmq.curve_keypair()
        peer_public, peer_secret = zmq.curve_keypair()
        address = "tcp://127.0.0.1:*" if self._curve else f"ipc://{self._directory / pattern}.sock"
        init = {
            "pattern": pattern,
            "address": address,
            "secret_key": peer_secret.decode() if self._curve else None,
            "array_bytes": self._array_bytes,
        }
        peer = _Peer(init, self._environment)
        resources.push_async_callback(peer.close)
        bound_to = await peer.start()
        socket = context.socket(zmq.DEALER if pattern in ("calls", "joined") else zmq.REQ)
        socket.set_hwm(0)
        socket.rcvtimeo = socket.sndtimeo = round(_PATIENCE_S * 1e3)
        if self._curve:
            socket.curve_serverkey = peer_public
            socket.curve_publickey, socket.curve_secretkey = own_public, own_secret
        socket.connect(bound_to)
        self._sockets[pattern] = socket

    async def latency(self, argument: dict[str, str] | None, seconds: float) -> list[float]:
        """Microseconds of each call made one after the other within ``seconds``."""
        socket = self._sockets["latency"]
        call_id = 0

        def call() -> None:
            nonlocal call_id
            call_id += 1
            socket.send(pack_call(call_id, argument))
            if msgpack.unpackb(socket.recv()) != [call_id, argument]:
                raise BenchmarkFailed("the bare REP socket sent a different reply")

        return await in_thread(lambda: one_after_another_blocking(call, seconds))

    async def calls_per_s(self, seconds: float, in_flight: int) -> float:
        count, elapsed_s = await calls_in_flight(self._calls.call, seconds, in_flight)
        return count / elapsed_s

    async def one_way_per_s(self, seconds: float) -> float:
        """Messages per second by ``joined``."""

        async def burst(first: int) -> None:
            for number in range(first, first + ONE_WAY_BURST):
                self.joined.tell(number)
            await asyncio.sleep(0)  # the end of a tick

        return await one_way(burst, self.joined.told, seconds)

    async def array_gb_s(self, array: "np.ndarray[Any, np.dtype[np.uint8]]", stamp: int) -> float:
        """10^9 bytes per second of one transfer of ``array``, from the send to the acknowledgement.

        ``stamp``, 0 to 255, becomes the last byte of the array: the peer sends it back."""
        array[-1] = stamp
        socket = self._sockets["array"]

        def transfer() -> float:
            (elapsed_us,) = one_after_another_blocking(exchange, 1e-9)
            return array.nbytes / elapsed_us / 1e3

        def exchange() -> None:
            socket.send(array.data, copy=False)
            if socket.recv() != bytes([stamp]):
                raise BenchmarkFailed("the bare array did not arrive as it was sent")

        return await in_thread(transfer)


def pack_call(call_id: int, argument: dict[str, str] | None) -> bytes:
    endpoint, arguments = ("empty", []) if argument is None else ("echo_dict", [argument])
    packed: bytes = msgpack.packb([0, call_id, "echo", endpoint, 30.0, arguments, {}])
    return packed


class _CallsById:
    """The calling side of ``calls``."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._replies: dict[int, asyncio.Future[object]] = {}
        self._last_id = 0
        self._drain_again_scheduled = False
        self._descriptor = socket.FD
        self._loop.add_reader(self._descriptor, self._drain)

    async def call(self) -> object:
        self._last_id = call_id = self._last_id + 1
        reply = self._replies[call_id] = self._loop.create_future()
        self._socket.send(pack_call(call_id, None), zmq.NOBLOCK)
        # The descriptor is edge-triggered: sending may have taken its edge (zmq_getsockopt(3), ZMQ_FD).
        if not self._drain_again_scheduled:
            self._drain_again_scheduled = True
            self._loop.call_soon(self._drain_again)
        return await reply

    def _drain_again(self) -> None:
        self._drain_again_scheduled = False
        self._drain()

    def _drain(self) -> None:
        receive, replies = self._socket.recv, self._replies
        try:
            while True:
                call_id, value = msgpack.unpackb(receive(zmq.NOBLOCK))
                reply = replies.pop(call_id)
                if not reply.done():  # else its caller was cancelled
                    reply.set_result(value)
        except zmq.Again:
            return

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)


class _Peer:
    """One process of ``bare_zeromq_peer.py``. It ends with its standard input, so it never outlives this process."""

    def __init__(self, init: Mapping[str, object], environment: dict[str, str]) -> None:
        self._init = init
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        """Returns the address that the peer is bound to. Raises BenchmarkFailed if it does not start."""
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "flexmarl.launch.bench.bare_zeromq_peer",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env=self._environment, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(self._init).encode() + b"\n")
        try:
            line = await asyncio.wait_for(process.stdout.readline(), _PATIENCE_S)
        except TimeoutError:
            line = b""
        if not line:
            raise BenchmarkFailed(
                f"the bare {self._init['pattern']} peer did not start; see its output above"
            )
        return line.decode().strip()

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
