"""The sum of a policy's gradient over its replicas: once for a micro-batch, however many forwards that has.

    first replica    the sum so far + its samples ─┐
                                                   ├─ all-reduce ─> the next sum, in all replicas
    others                      0 + their samples ─┘

FSDP2 sums the gradient of a backward over the ranks of a replica, and adds it to the memory of the sum so far. So this
sum takes no memory of its own. The one of FSDP2 (a mesh of two dimensions) crosses hosts in each backward, or, with
``set_requires_all_reduce``, in the last; both keep the reduced gradients of all layers beside the sum so far, 4 bytes a
parameter.

Between two micro-batches all replicas have the whole sum: a policy that is suspended there continues bit for bit, and
its first replica speaks for all. One sum for a step would cross hosts less, but a suspended state would need the
gradient of each replica: R times its memory on the host.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeVar
from weakref import WeakMethod

from torch import Tensor, nn

from .gang_rank import GangRank, local

Forward = TypeVar("Forward")


class ReplicaSums:
    """Does nothing for a policy of one replica."""

    def __init__(self, parameters: Iterable[nn.Parameter], gang: GangRank) -> None:
        """``parameters``: of models that are divided over ``gang``. Those that are trained have gradients, whose memory
        stays the same."""
        self._gang = gang
        self._trained: list[nn.Parameter] = []
        self._sums: dict[nn.Parameter, Any] = {}
        self._is_last = False
        if gang.replicas > 1:
            self._trained = [parameter for parameter in parameters if parameter.requires_grad]
            # Not the method itself: a cycle with the parameters would keep the memory of a gang that is released.
            note = WeakMethod(self._note)
            hooked: list[Any] = self._trained  # its method has no types
            for parameter in hooked:
                parameter.register_post_accumulate_grad_hook(partial(_call, note))

    def of_micro_batch(self, forwards: Iterable[Forward], count: int) -> Iterator[Forward]:
        """Yields ``count`` forwards, each to be computed with its backward, and then sums the gradient of all of them.

        A layer's sum begins as soon as the last backward has its gradient, beside the rest of that backward.
        """
        if count and not self._gang.is_in_first_replica:
            for parameter in self._trained:
                _gradient(parameter).zero_()
        self._sums.clear()  # also if an error has ended the last micro-batch
        for number, forward in enumerate(forwards, 1):
            self._is_last = number == count
            yield forward
        self._is_last = False
        for parameter in self._trained if count else ():  # in the same order on all ranks
            if parameter not in self._sums:
                self._begin_sum(parameter)
        for work in self._sums.values():
            work.wait()
        self._sums.clear()

    def _note(self, parameter: nn.Parameter) -> None:
        """FSDP2 has added this parameter's gradient; on a GPU in the present stream, for which the sum waits."""
        if self._is_last:
            assert parameter not in self._sums, "a parameter gets its gradient once in a backward"
            self._begin_sum(parameter)

    def _begin_sum(self, parameter: nn.Parameter) -> None:
        if (gradient := _gradient(parameter)).numel():  # the same on this rank of all replicas
            self._sums[parameter] = self._gang.begin_replica_sum(gradient)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "allocated with the parameter"
    return local(parameter.grad)


def _call(note: WeakMethod[Any], parameter: nn.Parameter) -> None:
    if (live := note()) is not None:
        live(parameter)
