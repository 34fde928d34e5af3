"""The names under which a model's tensors travel: setter and getter must use the same. Does not import torch."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def without_ties(named: Mapping[str, T]) -> dict[str, T]:
    """Every object of ``named`` once, under the first of its names, in the same order. Tied weights have several names.

    Objects are compared by identity. Call with ``state_dict(keep_vars=True)``, which has the parameters themselves;
    without ``keep_vars`` torch makes a new tensor for every name.
    """
    first: dict[int, tuple[str, T]] = {}
    for name, value in named.items():
        first.setdefault(id(value), (name, value))
    return dict(first.values())
