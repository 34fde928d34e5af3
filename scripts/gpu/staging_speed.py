"""A suspended policy goes to the host's memory and back at the speed of the bus, and beside the card's computations.

Memory that another process has lent, as a slot of the shared pool uses it. The bound is a copy of pinned memory of the
same process; the computations are products of matrices, as many a second as the card does alone.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flexmarl.transport.host_memory.block import free_bytes
from flexmarl.transport.state import StateTransport

from .checks import Card, Check, LeftOut, at_least, part
from .digest_speed import measure_digests
from .peers import Peer, Side

if TYPE_CHECKING:
    from torch import Tensor

_STATE_BYTES: Final = 8_000_000_000
_LEAST_BYTES: Final = 1_000_000_000
_CPU_BYTES: Final = 4_000_000
_TENSOR_BYTES: Final = 128_000_000
_PINNED_BYTES: Final = 1 << 30
_LEAST_SHARE: Final = 0.7
_MOST_LOSS: Final = 0.1
_ALONE_S: Final = 2.0
_ROUNDS: Final = 3
_SIZE: Final = 8192
_CPU_SIZE: Final = 64
_QUEUED: Final = 8


def run(card: Card) -> Iterator[Check]:
    directory = card.in_folder("states").folder
    size_bytes = _CPU_BYTES
    if card.is_cuda:
        size_bytes = min(_STATE_BYTES, free_bytes(directory) // 4, card.total_bytes // 8)
        if size_bytes < _LEAST_BYTES:
            raise LeftOut(
                f"it needs {4 * _LEAST_BYTES / 1e9:g} GB of shared memory and an eighth of them on the card"
            )
    with Peer(card, directory) as peer:
        yield from part("digests", lambda: _compute_digests(peer))
        yield from part("staging", lambda: _copy(peer, size_bytes, card))
        yield from part("beside", lambda: _compute_beside(peer, card))


def _copy(peer: Peer, size_bytes: int, card: Card) -> Iterator[Check]:
    yield Check("state", size_bytes, "bytes")
    bounds = peer.call(measure_bus) if card.is_cuda else {"to the host": 0.0, "to the device": 0.0}
    rates = peer.call(stage, size_bytes)
    yield Check("lending its memory, once", rates["lend_s"], "s")
    yield Check("first copy to the host, which pins it", rates["first_s"], "s")
    for way, bound in bounds.items():
        yield Check(f"{way}: pinned copy", bound, "GB/s")
        rate = rates[way]
        yield Check(f"{way}: state", rate, "GB/s")
        if card.is_cuda:
            yield at_least(f"{way}: share of the pinned copy", rate / bound, _LEAST_SHARE)


def _compute_digests(peer: Peer) -> Iterator[Check]:
    for threads, (digests, copies) in peer.call(measure_digests).items():
        yield Check(f"digests beside copies, by {threads} threads", digests, "GB/s")
        yield Check(f"copies beside digests, by {threads} threads", copies, "GB/s")


def _compute_beside(peer: Peer, card: Card) -> Iterator[Check]:
    figures = peer.call(compute_beside)
    yield Check("products alone", figures["alone"], "/s")
    yield Check("products beside copies", figures["beside"], "/s")
    yield Check("copies beside products", figures["GB/s"], "GB/s")
    if card.is_cuda:
        loss = 1 - figures["beside"] / figures["alone"]
        yield Check("products lost", loss, "", f"<= {_MOST_LOSS:g}", loss <= _MOST_LOSS)


# ----------------------------------------------------------------------- in the other process


async def measure_bus(side: Side) -> dict[str, float]:
    """GB/s of plain copies from and to pinned memory."""
    import torch

    host = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    memory = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device=side.device)
    rates = {}
    for way, (target, source) in {"to the host": (host, memory), "to the device": (memory, host)}.items():
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(_ROUNDS):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates[way] = _ROUNDS * _PINNED_BYTES / (time.perf_counter() - began) / 1e9
    return rates


async def stage(side: Side, size_bytes: int) -> dict[str, float]:
    """GB/s of a state that is set in lent memory, and read back; kept for ``compute_beside``."""
    transport = await side.transport()
    staged = await Staged.make(side, transport, size_bytes)
    first = await staged.set()
    to_host = min([await staged.set() for _ in range(_ROUNDS)])
    await staged.get()
    to_device = min([await staged.get() for _ in range(_ROUNDS)])
    side.kept["staged"] = staged
    return {
        "lend_s": staged.lend_s, "first_s": first,
        "to the host": size_bytes / to_host / 1e9, "to the device": size_bytes / to_device / 1e9,
    }  # fmt: skip


async def compute_beside(side: Side) -> dict[str, float]:
    """Products a second without and with copies of the state beside them."""
    staged: Staged = side.kept["staged"]
    with Products(side.device) as products:
        await asyncio.sleep(_ALONE_S / 4)  # the card's clock rises
        alone = await products.rate_during(asyncio.sleep(_ALONE_S))
        copied = 0

        async def copy() -> None:
            nonlocal copied
            ends = time.monotonic() + _ALONE_S
            while time.monotonic() < ends:
                await staged.set()
                await staged.get()
                copied += 2

        began = time.perf_counter()
        beside = await products.rate_during(copy())
        seconds = time.perf_counter() - began
    await staged.close()
    return {"alone": alone, "beside": beside, "GB/s": copied * staged.size_bytes / seconds / 1e9}


class Staged:
    """A state on the device, and the memory of the host that it is set in: that of another transport, as the facade of
    the shared pool has it."""

    def __init__(
        self, transport: StateTransport, lender: StateTransport, tensors: "dict[str, Tensor]"
    ) -> None:
        self._transport = transport
        self._lender = lender
        self._tensors = tensors
        self.size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.lend_s = 0.0
        self._lent: Any = None
        self._version = 0
        self._handle: Any = None

    @classmethod
    async def make(cls, side: Side, transport: StateTransport, size_bytes: int) -> "Staged":
        """Lends the memory."""
        import torch

        tensors = {}
        for number, start in enumerate(range(0, size_bytes, _TENSOR_BYTES)):
            count = min(_TENSOR_BYTES, size_bytes - start) // 4
            values = torch.full(
                (count,), float(number), device="cpu" if side.device == "cpu" else side.device
            )
            tensors[f"w{number}"] = side.place(values) if side.device == "cpu" else values
        lender = await StateTransport(Path(side.directory)).__aenter__()
        staged = cls(transport, lender, tensors)
        began = time.perf_counter()
        staged._lent = await lender.lend("solver", size_bytes + (1 << 20))
        staged.lend_s = time.perf_counter() - began
        return staged

    async def set(self) -> float:
        """Seconds of a copy to the host."""
        self._version += 1
        began = time.perf_counter()
        self._handle = await self._transport.set(
            "solver", self._tensors, version=self._version, lent=self._lent
        )
        return time.perf_counter() - began

    async def get(self) -> float:
        """Seconds of a copy back."""
        began = time.perf_counter()
        await self._transport.get(self._handle, into=self._tensors, path="shm")
        return time.perf_counter() - began

    async def close(self) -> None:
        """Frees the memory."""
        await self._lender.close()


class Products:
    """A thread that has the device multiply matrices, a few calls ahead of it, as a trainer does."""

    def __init__(self, device: str) -> None:
        import torch

        self._device = device
        size, dtype = (_CPU_SIZE, torch.float32) if device == "cpu" else (_SIZE, torch.bfloat16)
        self._factor = torch.randn(size, size, device=device, dtype=dtype)
        if device != "cpu":
            torch.cuda.synchronize(device)  # the thread uses another stream
        self._stop = threading.Event()
        self._count = 0
        self._thread = threading.Thread(target=self._multiply, name="products")

    def __enter__(self) -> "Products":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def rate_during(self, work: Any) -> float:
        """Products a second until ``work`` is done."""
        began, count = time.perf_counter(), self._count
        await work
        return (self._count - count) / (time.perf_counter() - began)

    def _multiply(self) -> None:
        import torch

        product = torch.empty_like(self._factor)
        if self._device == "cpu":
            while not self._stop.is_set():
                torch.mm(self._factor, self._factor, out=product)
                self._count += 1
            return
        # A stream of its own: a copy waits for what its own thread's stream and the shared one were given before, which
        # here are the computations of another policy.
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        events: deque[torch.cuda.Event] = deque()
        with torch.cuda.stream(stream):
            while not self._stop.is_set():
                torch.mm(self._factor, self._factor, out=product)
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(stream)
                events.append(event)
                if len(events) > _QUEUED:
                    events.popleft().synchronize()
                    self._count += 1
        stream.synchronize()
