"""Weights that are written into memory of others, so that they are in memory once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """``outline``: names, shapes and dtypes, such as tensors on the device ``meta``. ``write`` copies all weights into
    tensors of these names, one after the other; to be called once. Raises as the function that gives the source."""

    outline: Mapping[str, Any]
    write: Callable[[Mapping[str, Any]], None]
