"""A publish takes the time of its copy, with seconds of computations queued, and has room when the cache is full.

A policy's weights are complete, and seconds of other computations are queued behind them: the publish waits for none of
these. Then PyTorch's cache holds almost the whole card: a publish takes its memory from there.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from .checks import Card, Check, at_most, holds, part
from .peers import FAKE, Peer, Side

if TYPE_CHECKING:
    from torch import Tensor

_SIZES: Final = (1_000_000_000, 4_000_000_000, 15_000_000_000)
_CPU_SIZES: Final = (4_000_000,)
_TENSOR_BYTES: Final = 128_000_000
_QUEUED_S: Final = 5.0
_MOST_LAUNCHES: Final = 800  # the driver's queue has about 1000 places: the next launch would wait
_CACHED: Final = 0.95
_SLACK_S: Final = 0.5
_ROWS, _INNER = 16384, 8192


def run(card: Card) -> Iterator[Check]:
    sizes = [size for size in _SIZES if 4 * size < card.total_bytes] if card.is_cuda else list(_CPU_SIZES)
    with (
        Peer(card, card.in_folder("queue").folder) as busy,
        Peer(card, card.in_folder("cache").folder) as full,
    ):
        # One after the other: both take most of the card.
        for size in sizes:
            yield from part(f"{size / 1e9:g} GB", lambda size=size: _publish_beside(busy, size, card))  # type: ignore[misc]
        busy.end()
        yield from part("full cache", lambda: _publish_from_cache(full, sizes[:2][-1], card))


def _publish_beside(peer: Peer, size_bytes: int, card: Card) -> Iterator[Check]:
    name = f"{size_bytes / 1e9:g} GB"
    figures = peer.call(publish_beside_work, size_bytes)
    yield Check(f"{name}: first publish, which takes the memory", figures["first_s"], "s")
    yield Check(f"{name}: publish alone", figures["alone_s"], "s")
    yield Check(f"{name}: publish alone", size_bytes / figures["alone_s"] / 1e9, "GB/s")
    yield Check(f"{name}: computations queued", figures["queued_s"], "s")
    busy_s = figures["busy_s"]
    if card.is_cuda:
        yield at_most(f"{name}: publish beside them", busy_s, 3 * figures["alone_s"] + _SLACK_S, "s")
    else:
        yield Check(f"{name}: publish beside them", busy_s, "s")
    still = bool(figures["still_computing"])
    yield holds(f"{name}: the card was computing at its end", still, "yes", still)


def _publish_from_cache(peer: Peer, size_bytes: int, card: Card) -> Iterator[Check]:
    figures = peer.call(publish_from_full_cache, size_bytes)
    yield Check("full cache: bytes of the cache before", figures["cached_bytes"], "bytes")
    yield Check("full cache: free for others before", figures["free_bytes"], "bytes")
    yield Check("full cache: publish", figures["publish_s"], "s")
    path = str(figures["paths"])
    yield holds("full cache: published by", path, "cuda_ipc, shm", path == "cuda_ipc, shm")


# ----------------------------------------------------------------------- in the other process


async def publish_beside_work(side: Side, size_bytes: int) -> dict[str, float]:
    """Seconds of a publish on an idle device and behind queued computations."""
    transport = await side.transport()
    weights = _weights(side, size_bytes)
    key = f"solver-{size_bytes}"

    async def publish(version: int, after: Any = None) -> float:
        began = time.perf_counter()
        await transport.set(key, weights, version=version, offer=["cuda_ipc"], after=after)
        return time.perf_counter() - began

    first = await publish(0)
    await publish(1)
    alone = await publish(2)
    computations = Computations(side)
    complete = transport.record()  # the weights are; what follows is another policy's
    queued = computations.begin()
    busy = await publish(3, complete)
    still = computations.are_under_way()
    computations.end()
    await transport.drop(key)
    return {
        "first_s": first, "alone_s": alone, "queued_s": queued, "busy_s": busy, "still_computing": still,
    }  # fmt: skip


async def publish_from_full_cache(side: Side, size_bytes: int) -> dict[str, Any]:
    """Publishes while PyTorch's allocator has freed most of the device and keeps it."""
    import torch

    transport = await side.transport()
    weights = _weights(side, size_bytes)
    device = side.devices.visible()[0]
    await transport.set("small", {"w": side.place(torch.ones(8))}, version=0)  # the probe, with room
    free = side.devices.memory(device).free_bytes
    piece = max(1 << 20, free // 64)
    count = int(_CACHED * free / piece)
    if side.device == "cpu":
        for _ in range(count):
            side.devices.cache(FAKE, piece)  # type: ignore[attr-defined]
    else:
        pieces = [torch.empty(piece, dtype=torch.uint8, device=side.device) for _ in range(count)]
        del pieces
    cached = count * piece if side.device == "cpu" else torch.cuda.memory_reserved(side.device)
    free_bytes = side.devices.memory(device).free_bytes
    began = time.perf_counter()
    handle = await transport.set("solver", weights, version=0)
    return {
        "cached_bytes": cached, "free_bytes": free_bytes, "publish_s": time.perf_counter() - began,
        "paths": ", ".join(source.path for source in handle.sources),
    }  # fmt: skip


def _weights(side: Side, size_bytes: int) -> "dict[str, Tensor]":
    import torch

    sizes = [min(_TENSOR_BYTES, size_bytes - start) for start in range(0, size_bytes, _TENSOR_BYTES)]
    if side.device == "cpu":
        return {
            f"w{n}": side.place(torch.ones(size // 2, dtype=torch.bfloat16)) for n, size in enumerate(sizes)
        }
    return {
        f"w{n}": torch.ones(size // 2, dtype=torch.bfloat16, device=side.device)
        for n, size in enumerate(sizes)
    }


class Computations:
    """Seconds of products in the queue of the device, as a backward would be."""

    def __init__(self, side: Side) -> None:
        import torch

        self._side = side
        self._done = False
        if side.device != "cpu":
            self._factors = (
                torch.randn(_ROWS, _INNER, device=side.device, dtype=torch.bfloat16),
                torch.randn(_INNER, _ROWS, device=side.device, dtype=torch.bfloat16),
            )
            self._product = torch.empty(_ROWS, _ROWS, device=side.device, dtype=torch.bfloat16)
            self._multiply(3)
            torch.cuda.synchronize()
            began = time.perf_counter()
            self._multiply(10)
            torch.cuda.synchronize()
            self._seconds = (time.perf_counter() - began) / 10

    def _multiply(self, count: int) -> None:
        import torch

        for _ in range(count):
            torch.mm(*self._factors, out=self._product)

    def begin(self) -> float:
        """Queues them, and returns the seconds that they will take."""
        import torch

        if self._side.device == "cpu":

            def work() -> None:
                self._done = True

            self._side.devices.compute(FAKE, work)  # type: ignore[attr-defined]
            return 0.0
        count = min(_MOST_LAUNCHES, max(1, round(_QUEUED_S / self._seconds)))
        self._multiply(count)
        self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last.record()
        return count * self._seconds

    def are_under_way(self) -> bool:
        """False when the device has done them."""
        if self._side.device == "cpu":
            return not self._done
        return not self._last.query()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Waits for them."""
        if self._side.device == "cpu":
            self._side.devices.record([FAKE]).synchronize()
        else:
            self._last.synchronize()
