"""Seconds and memory on a device, which computes after the call that began it has returned."""

import gc
import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: str) -> None:
    """Waits until the device has done all that it was given; nothing to wait for on a CPU."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def seconds_of(device: str, work: Callable[[], object], rounds: int = 1) -> float:
    """The median of ``rounds`` of ``work``, until the device has done it."""
    seconds = []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def free_memory(device: str) -> None:
    """Frees what nothing uses: objects that refer to each other, and on a CUDA device the allocator's cache."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def live_bytes(device: str) -> int:
    """Bytes of all tensors on the device: by PyTorch's allocator, or on a CPU by the tensors that the collector sees,
    those among them that only wait for it. Nothing is collected here."""
    if device != "cpu":
        return int(torch.cuda.memory_allocated(device))
    storages = {}
    for candidate in gc.get_objects():
        if type(candidate) in (torch.Tensor, torch.nn.Parameter) and candidate.device.type == "cpu":
            storage = candidate.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_bytes(device: str, work: Callable[[], object]) -> int:
    """The most bytes of tensors on a CUDA device during ``work``, of the whole process; 0 on a CPU, which has no such
    count."""
    if device == "cpu":
        work()
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device))


def matmul_flops(device: str, size: int, rounds: int = 20) -> float:
    """The rate of a square product in bf16: the bound of a rate that any model reaches."""
    factor = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(factor)
    seconds_of(device, lambda: torch.mm(factor, factor, out=product), 3)
    return 2 * size**3 / seconds_of(device, lambda: torch.mm(factor, factor, out=product), rounds)
