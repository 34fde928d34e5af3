"""PyTorch's threads in a process that measures."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Inside, PyTorch computes with one thread, as in the processes of actors: with more, sums are rounded in another
    order, and small models get slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
