"""Collectives of gloo whose tensors are freed by the thread that calls them.

The thread of gloo that has computed a collective may drop its tensors a moment after the caller, and is then the one
that frees them. The profiler of the caller's thread does not see that: such tensors would be counted for ever.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import distributed

c10d: Any = distributed  # half of its names have no types

_KINDS: Final = ("all_gather_single", "reduce_scatter_single", "allreduce")


@contextmanager
def one_thread() -> Iterator[None]:
    """Process groups of gloo that are made within it have one thread each: it drops the tensors of a collective before
    it begins the next one."""
    options = c10d.ProcessGroupGloo._Options

    def make() -> Any:
        made = options()
        made._threads = 1
        return made

    with patch.object(c10d.ProcessGroupGloo, "_Options", make):
        yield


@contextmanager
def settled_collectives() -> Iterator[None]:
    """Within it a collective returns when gloo has dropped its tensors. For groups of ``one_thread``; all ranks are to
    be within it at the same collectives."""
    with ExitStack() as stack:
        reduce = distributed.ProcessGroup.allreduce
        for kind in _KINDS:
            call = getattr(distributed.ProcessGroup, kind)
            stack.enter_context(patch.object(distributed.ProcessGroup, kind, _settled(call, reduce)))
        yield


class _Ended:
    """Stands for the work of a collective that has ended, in which it has no tensors."""

    def wait(self) -> None:
        return None


def _settled(call: Callable[..., Any], reduce: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def settle(group: Any, *arguments: Any) -> _Ended:
        work = call(group, *arguments)
        work.wait()
        # Not a barrier, which keeps a part of the works before it.
        reduce(group, [torch.zeros(1)], distributed.AllreduceOptions()).wait()
        del work  # the last reference, which no thread of gloo has any more
        return _Ended()

    return settle
