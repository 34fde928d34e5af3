"""The differences between the log-probabilities of trained tokens by trainer and engine, and their form on the way from
a trainer into the run's file of trajectories.

If both are of one version, a difference is rounding, or a fault; a sample that was trained late has the difference of
the versions too. The engine's are in the record of the trajectory already: a difference of float16 is half as long as
another log-probability, and exact to 0.05 % of itself.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

_DTYPE: Final = np.dtype("<f2")


class Compared(NamedTuple):
    """The tokens of a sample. ``version``: of the trainer's policy, before its step. ``differences`` ``[T]``: trainer
    minus engine."""

    version: int
    differences: NDArray[np.float16]


class ComparedGroup(NamedTuple):
    """Samples of one group. ``content``: for ``compared_of``. ``entries``: how many samples."""

    step: int
    query: str
    content: bytes
    entries: int


def pack_compared(samples: Mapping[str, Compared]) -> bytes:
    """``samples``: by their id, of training."""
    groups: dict[tuple[int, str], list[tuple[int, int, int, bytes]]] = {}
    for sample_id, compared in samples.items():
        # The store has checked these ids: a tenth of the time of ``SampleId.parse``.
        scope, _, rest = sample_id.partition(":")
        query, turn, trajectory = rest.rsplit("_", 2)
        cells = (int(trajectory), int(turn), compared.version, compared.differences.astype(_DTYPE).tobytes())
        groups.setdefault((int(scope), query), []).append(cells)
    rows = [(*name, _packb(of_group), len(of_group)) for name, of_group in groups.items()]
    return _packb(rows)


def unpack_compared(record: bytes) -> list[ComparedGroup]:
    """The groups of a record of ``pack_compared``. Raises ValueError for anything else."""
    try:
        return [ComparedGroup(*row) for row in _unpackb(record)]
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"not a record of log-probabilities: {error}") from error


def compared_of(content: bytes) -> dict[tuple[int, int], Compared]:
    """By trajectory and turn. Raises ValueError for damaged ``content``."""
    try:
        return {
            (trajectory, turn): Compared(version, np.frombuffer(values, _DTYPE))
            for trajectory, turn, version, values in _unpackb(content)
        }
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"its log-probabilities are damaged: {error}") from error


def _packb(what: Any) -> bytes:
    data: bytes = msgpack.packb(what)
    return data


def _unpackb(data: bytes) -> Any:
    return msgpack.unpackb(data)
