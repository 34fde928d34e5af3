"""Which tensors of a model travel, and under which name. What sets and what gets must agree; torch is not imported."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def without_ties(named: Mapping[str, T]) -> dict[str, T]:
    """Every object of ``named`` once, under the first of its names: tied weights have several.

    In the order of ``named``. What counts is the object: take ``state_dict(keep_vars=True)``, which has the
    parameters themselves, for without it torch makes a new tensor for every name.
    """
    first: dict[int, tuple[str, T]] = {}
    for name, value in named.items():
        first.setdefault(id(value), (name, value))
    return dict(first.values())
