"""Counts the operations at which a host would wait for a GPU, on a CPU."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Their results, or the sizes of their results, depend on the numbers in a tensor.
READING: Final = {
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim",
    "unique_consecutive",
}  # fmt: skip
METHODS: Final = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """The waits within it, each with the line of our code that made it. Those of transformers don't count."""
    waits: list[str] = []
    with _Calls(waits), _Operations(waits):
        yield waits


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    def __init__(self, waits: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").partition(".")[0]
        # As torch does it on a GPU: without the result's size it reads the sum of the counts.
        repeats = func.name() == "aten::repeat_interleave.Tensor" and kwargs.get("output_size") is None
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        checks = name == "segment_reduce" and not kwargs.get("unsafe", False)
        if name in READING or repeats or masks or checks:
            _note(self._waits, name)
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Sees ``Tensor.tolist`` of a CPU's tensor, which a dispatch mode does not."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in METHODS:
            _note(self._waits, func.__name__)
        return func(*args, **(kwargs or {}))


def _note(waits: list[str], name: str) -> None:
    frame = sys._getframe(2)
    while (
        "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__
    ) and frame.f_back is not None:
        frame = frame.f_back
    if "/transformers/" not in frame.f_code.co_filename:
        waits.append(f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}")
