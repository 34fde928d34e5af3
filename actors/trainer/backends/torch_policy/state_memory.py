"""Memory of training states on a rank, which outlives the models that use it."""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from .....transport.handle import TensorSpec


class StateMemory:
    """Tensors of a state by the names of ``base_state()`` and ``gradients()``. Models take them over one by one."""

    def __init__(self, tensors: dict[str, Tensor] | None = None) -> None:
        self.tensors = tensors or {}

    def take(self, name: str, like: Tensor) -> Tensor:
        """Hands over the tensor ``name`` with its contents. Zeros if there is no such tensor with the shape, dtype
        and device of ``like``."""
        tensor = self.tensors.get(name)
        if tensor is None or (tensor.shape, tensor.dtype, tensor.device) != (
            like.shape,
            like.dtype,
            like.device,
        ):
            return torch.zeros_like(like)
        return self.tensors.pop(name)

    def rows(self, prefix: str) -> dict[str, Callable[[], Tensor]]:
        """Functions that hand over the tensors whose names begin with ``prefix``, by the rest of the names."""
        return {
            name.removeprefix(prefix): partial(self.tensors.pop, name)
            for name in self.tensors
            if name.startswith(prefix)
        }

    def has(self, specs: Iterable[TensorSpec]) -> bool:
        """It has all tensors of ``specs``, perhaps more."""
        return all(
            (tensor := self.tensors.get(spec.name)) is not None
            and tensor.shape == spec.shape
            and tensor.dtype == getattr(torch, spec.dtype)
            for spec in specs
        )


def new_memory(specs: Iterable[TensorSpec], device: torch.device) -> StateMemory:
    """Allocates a tensor for each of ``specs`` on ``device``, without setting its contents."""
    return StateMemory(
        {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for spec in specs
        }
    )


class KeptMemories:
    """Memories of ranks whose policies have left, the latest ``most``. For any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[StateMemory] = []
        self._lock = threading.Lock()

    def keep(self, memory: StateMemory) -> None:
        """Keeps the memory for a later ``take``; beyond ``most`` the oldest one is freed."""
        with self._lock:
            self._kept.append(memory)
            del self._kept[: -self._most or None]

    def clear(self) -> None:
        """Frees all memories that are kept."""
        with self._lock:
            self._kept.clear()

    def take(self, specs: Sequence[TensorSpec]) -> StateMemory | None:
        """The latest kept memory with tensors of ``specs``, whose contents are not set; None if none has them."""
        with self._lock:
            for memory in reversed(self._kept):
                if memory.has(specs):
                    self._kept.remove(memory)
                    return memory
        return None
