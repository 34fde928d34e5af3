"""Digests of the host's memory, by several threads, while the device's copies write into the same memory.

A state moves at the slower one of two rates, those of the bus and of its digests. Beside copies digests are slower than
alone, since both use the host's memory: this shows whether a state is slow by the memory or by its own code.
"""

import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import xxhash

from flexmarl.transport.host_memory.block import CHUNK_BYTES

from .peers import Side

if TYPE_CHECKING:
    from torch import Tensor

_THREADS: Final = (4, 8, 16)
_PINNED_BYTES: Final = 1 << 30
_CPU_BYTES: Final = 8 << 20
_COPIED_BYTES: Final = 64 << 20
_ROUNDS: Final = 3


async def measure_digests(side: Side) -> dict[int, tuple[float, float]]:
    """GB/s of the digests and of the copies beside them, by the number of threads: those for which there are cores."""
    import torch

    is_cuda = side.device != "cpu"
    size_bytes = _PINNED_BYTES if is_cuda else _CPU_BYTES
    host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    memory = torch.zeros(size_bytes, dtype=torch.uint8, device=side.device)
    cores = len(os.sched_getaffinity(0))
    rates = {}
    for threads in [count for count in _THREADS if count <= cores] or [cores]:
        with _Copies(host, memory) as copies:
            began, copied_bytes = time.perf_counter(), copies.size_bytes
            _compute_digests(threads, host.numpy().data)
            seconds = time.perf_counter() - began
            copied_bytes = copies.size_bytes - copied_bytes
        rates[threads] = (_ROUNDS * size_bytes / seconds / 1e9, copied_bytes / seconds / 1e9)
    return rates


def _compute_digests(threads: int, payload: memoryview) -> None:
    starts = [start for _ in range(_ROUNDS) for start in range(0, len(payload), CHUNK_BYTES)]
    numbers = itertools.count()

    def compute() -> None:
        while (number := next(numbers)) < len(starts):
            xxhash.xxh3_64_intdigest(payload[starts[number] : starts[number] + CHUNK_BYTES])

    with ThreadPoolExecutor(threads) as pool:
        for work in [pool.submit(compute) for _ in range(threads)]:
            work.result()


class _Copies:
    """A thread that copies from the device to ``host`` without a pause. ``size_bytes``: of all copies, more than 0 when
    the block begins."""

    def __init__(self, host: "Tensor", memory: "Tensor") -> None:
        starts = range(0, host.nbytes, _COPIED_BYTES)
        self._pairs = [
            (host[start : start + _COPIED_BYTES], memory[start : start + _COPIED_BYTES]) for start in starts
        ]
        self._under_way = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="copies")
        self.size_bytes = 0

    def __enter__(self) -> "_Copies":
        self._thread.start()
        self._under_way.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _copy(self) -> None:
        try:
            for target, source in itertools.cycle(self._pairs):
                if self._stop.is_set():
                    return
                target.copy_(source)  # returns when it is done; without the GIL
                self.size_bytes += target.nbytes
                self._under_way.set()
        finally:
            self._under_way.set()  # also behind an error, which the thread shows on standard error
