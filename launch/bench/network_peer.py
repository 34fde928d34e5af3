"""A process of ``flexmarl bench network``, ``python -m flexmarl.launch.bench.network_peer``: the owner of states, or
one of their readers.

Standard input carries a line of JSON with the settings, then one with each command; standard output carries a line of
JSON with the result of each. The process ends with its standard input.
"""

import asyncio
import json
import sys
import threading
import time
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path
from socket import IPPROTO_TCP, TCP_NODELAY, create_connection, create_server, socket
from typing import Any, Final

import numpy as np
import torch
import uvloop
import xxhash
import zmq
from pydantic import TypeAdapter

from ...core.system import ActorSystem
from ...core.wire.curve import Keys
from ...core.wire.zeromq import Tcp
from ...transport.handle import StateHandle
from ...transport.host_memory.block import CHUNK_BYTES
from ...transport.remote.bulk import Bulk, secure
from ...transport.state import StateTransport
from ..errors import BenchmarkFailed
from . import flexmarl_calls
from .bare_zeromq import pack_call
from .bare_zeromq_peer import reply_to
from .bench_actors import Echo
from .measure import one_after_another_blocking, percentile

_KEY: Final = "weights"
_HANDLES: Final = TypeAdapter(StateHandle)
_REQUEST: Final = 16


class Peer:
    """Both sides. ``directory``: of this host, on tmpfs. ``host``: the address to listen on."""

    def __init__(self, directory: str, host: str, keys: str, size_bytes: int, encrypted: bool) -> None:
        self._keys = Keys.load(Path(keys))
        self._host = host
        self._bulk = Bulk(host, self._keys, encrypted)
        self._transport = StateTransport(Path(directory), bulk=self._bulk)
        self._state = {"w": torch.zeros(size_bytes // 2, dtype=torch.bfloat16)}
        self._memory = memoryview(self._state["w"].view(torch.uint8).numpy().data)
        self._version = 0
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> "Peer":
        torch.set_num_threads(1)
        await self._resources.enter_async_context(self._transport)
        tcp = Tcp(self._host, keys=self._keys)
        self._system = await self._resources.enter_async_context(ActorSystem("bench", tcp=tcp))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._resources.aclose()

    # ----------------------------------------------------------------------- owner

    async def serve(self) -> dict[str, Any]:
        """Begins to serve calls, bare calls and bare bytes; returns the addresses."""
        await self._system.spawn(Echo, "echo")
        listener = create_server((self._host, 0))
        threading.Thread(target=self._serve_bytes, args=(listener,), daemon=True).start()
        public, secret = zmq.curve_keypair()
        replying = zmq.Context().socket(zmq.REP)
        replying.curve_server, replying.curve_secretkey = True, secret
        replying.bind(f"tcp://{self._host}:*")
        address = replying.getsockopt_string(zmq.LAST_ENDPOINT)
        threading.Thread(target=_serve_calls, args=(replying,), daemon=True).start()
        bare_calls = [address, public.decode()]
        return {"calls": self._system.address, "bytes": listener.getsockname()[1], "bare_calls": bare_calls}

    def _serve_bytes(self, listener: socket) -> None:
        while True:
            raw, _ = listener.accept()
            threading.Thread(target=self._send_bytes, args=(raw,), daemon=True).start()

    def _send_bytes(self, raw: socket) -> None:
        raw.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        # TLS reports a reader that ends the connection as an error.
        with closing(secure(raw, self._bulk, server=True)) as connection, suppress(OSError):
            while request := connection.recv(_REQUEST):
                start, end = int.from_bytes(request[:8]), int.from_bytes(request[8:])
                connection.sendall(self._memory[start:end])

    async def change(self, share: float) -> dict[str, Any]:
        """Makes that share of the values different: all, or some at random places. Returns the digest."""
        words = self._state["w"].view(torch.int16)
        if share == 1:
            words.bitwise_xor_(1)
        else:
            places = torch.randint(0, len(words), (round(share * len(words)),))
            words[places] ^= 1
        return {"digest": self._sum()}

    async def set(self) -> dict[str, Any]:
        self._version += 1
        before = time.process_time()
        handle = await self._transport.set(_KEY, self._state, version=self._version, timeout_s=600)
        set_cpu_s = time.process_time() - before
        return {"handle": _HANDLES.dump_python(handle, mode="json"), "set_cpu_s": set_cpu_s}

    async def cpu(self) -> dict[str, Any]:
        """Processor seconds of this process so far."""
        return {"cpu_s": time.process_time()}

    def _sum(self) -> int:
        return int(self._state["w"].view(torch.int64).sum())

    # ----------------------------------------------------------------------- reader

    async def get(self, handle: dict[str, Any], digest: int) -> dict[str, Any]:
        """Seconds of a Get into memory that exists, until the state could be read on this host, and of its processors
        for both.
        Raises BenchmarkFailed if other bytes have come."""
        state = _HANDLES.validate_python(handle)
        before = self._transport.statistics().network
        assert before is not None, "it has a network"
        got_before, delta_before = before.got_bytes, before.got_delta_bytes
        started, cpu_before = time.perf_counter(), time.process_time()
        async with self._transport.mapped(state, like=self._state, timeout_s=600):
            arrived_s = time.perf_counter() - started
            arrived_cpu_s = time.process_time() - cpu_before
        await self._transport.get(state, into=self._state, timeout_s=600)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
        if self._sum() != digest:
            raise BenchmarkFailed("a state came out different")
        after = self._transport.statistics().network
        assert after is not None, "it has a network"
        got, delta = after.got_bytes - got_before, after.got_delta_bytes - delta_before
        return {
            "seconds": seconds, "arrived_s": arrived_s, "cpu_s": cpu_s, "arrived_cpu_s": arrived_cpu_s,
            "got_bytes": got, "delta_bytes": delta,
        }  # fmt: skip

    async def passes(self) -> dict[str, Any]:
        """Processor seconds to compare a state's bytes with others, and to copy them and compute their digests. The
        state of this process is overwritten."""
        return {"cpu_s": await asyncio.to_thread(self._passes)}

    def _passes(self) -> float:
        half = len(self._memory) // 2
        memory = np.frombuffer(self._memory, np.uint8)
        differs = np.empty(min(CHUNK_BYTES, half) // 8, np.bool_)
        started = time.thread_time()
        for _ in range(2):  # each compares and copies half a state
            for start in range(0, half - half % 8, CHUNK_BYTES):
                end = min(start + CHUNK_BYTES, half)
                old, new = memory[start:end], memory[half + start : half + end]
                words = old.view(np.uint64), new.view(np.uint64)
                np.not_equal(*words, out=differs[: len(words[0])])
        for _ in range(2):
            for start in range(0, half, CHUNK_BYTES):
                end = min(start + CHUNK_BYTES, half)
                memory[half + start : half + end] = memory[start:end]
                xxhash.xxh3_64_intdigest(self._memory[half + start : half + end])
        return time.thread_time() - started

    async def copy(self) -> dict[str, Any]:
        """Seconds to copy as many bytes as the state has, by two threads, without digests. The state of this process is
        overwritten."""
        half = len(self._memory) // 2
        memory = np.frombuffer(self._memory, np.uint8)

        def twice(start: int, end: int) -> None:
            for _ in range(2):
                memory[half + start : half + end] = memory[start:end]

        started = time.perf_counter()
        ranges = ((0, half // 2), (half // 2, half))
        await asyncio.gather(*(asyncio.to_thread(twice, *part) for part in ranges))
        return {"seconds": time.perf_counter() - started}

    async def bare(self, port: int, address: str, connections: int) -> dict[str, Any]:
        """Seconds of receiving the state into the same memory, with the same security, without digests, and of this
        process's processors."""
        before = time.process_time()
        seconds = await asyncio.to_thread(self._receive, port, address, connections)
        return {"seconds": seconds, "cpu_s": time.process_time() - before}

    def _receive(self, port: int, address: str, connections: int) -> float:
        part = len(self._memory) // connections

        def receive_part(number: int) -> None:
            with closing(create_connection((address, port))) as raw:
                connection = secure(raw, self._bulk, server=False)
                start = number * part
                connection.sendall(start.to_bytes(8) + (start + part).to_bytes(8))
                got = 0
                while got < part:
                    got += connection.recv_into(self._memory[start + got : start + part])
                connection.close()

        threads = [threading.Thread(target=receive_part, args=(number,)) for number in range(connections)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - started

    async def calls(self, address: str, seconds: float) -> dict[str, Any]:
        """The median of an empty call, microseconds."""
        await self._system.connect(address)
        echo = await self._system.lookup("echo", Echo)
        await flexmarl_calls.latency(echo, None, seconds / 5)
        return {"p50_us": percentile(await flexmarl_calls.latency(echo, None, seconds), 0.5)}

    async def bare_calls(self, address: str, public: str, seconds: float) -> dict[str, Any]:
        """The same by REQ/REP with CURVE."""
        return {"p50_us": await asyncio.to_thread(_bare_calls, address, public, seconds)}


def _serve_calls(replying: "zmq.Socket[bytes]") -> None:
    while True:
        replying.send(reply_to(replying.recv()))


def _bare_calls(address: str, public: str, seconds: float) -> float:
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        asking.curve_serverkey = public.encode()
        asking.curve_publickey, asking.curve_secretkey = zmq.curve_keypair()
        asking.rcvtimeo = 30_000
        asking.connect(address)

        def call() -> None:
            asking.send(pack_call(1, None))
            asking.recv()

        one_after_another_blocking(call, seconds / 5)
        return percentile(one_after_another_blocking(call, seconds), 0.5)


async def main() -> None:
    settings = json.loads(await asyncio.to_thread(sys.stdin.readline))
    async with Peer(**settings) as peer:
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            result = await getattr(peer, command.pop("do"))(**command)
            print(json.dumps(result), flush=True)  # noqa: T201  # the bench reads it


if __name__ == "__main__":
    uvloop.run(main())
