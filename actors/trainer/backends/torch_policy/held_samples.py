"""Samples that wait in the trainer for the end of their step, and the division of a step into updates.

A step of several updates takes one optimizer step for each of them. The gradient of the first is accumulated while the
rollout still runs. Samples of the others are held, with the figures of the policy at the step's begin that their loss
needs: these are computed when they arrive, as the first optimizer step changes the weights. The alternatives cost more:
a copy of the weights is a whole model, and a forward behind the rollout is time in which nothing else is computed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import DTypeLike, NDArray
from pydantic import TypeAdapter

from ....columns.column_refs import inline_array, plain_cell
from ....messages import Sample
from .forward_batches import TrainedSample


@dataclass(frozen=True, slots=True)
class HeldSample:
    """A sample, and the figures that its loss needs of the policy at the step's begin. ``old_logprobs``, and
    ``advantages`` and ``returns`` of a critic: see ``TrainedSample``. They are the bytes of float32 arrays, because
    they travel with a suspended policy; empty for a loss that needs none."""

    sample: Sample
    old_logprobs: bytes = b""
    advantages: bytes = b""
    returns: bytes = b""

    @classmethod
    def of(cls, row: TrainedSample) -> "HeldSample":
        """Takes over a critic's advantages alone: another advantage comes with the sample itself."""
        advantages = b"" if isinstance(row.advantage, float) else row.advantage.tobytes()
        return cls(row.sample, _bytes(row.old_logprobs), advantages, _bytes(row.returns))

    def trained(self, advantage: float) -> TrainedSample:
        """The sample as it is trained. ``advantage``: the one that came with it, for a policy without a critic."""
        advantages = _array(self.advantages)
        return TrainedSample(
            self.sample,
            advantage if advantages is None else advantages,
            _array(self.old_logprobs),
            _array(self.returns),
        )


# Of all fields of a sample those with a value for each token. Python's floats are float64, and the KL of a held step is
# computed in it: as float32 they would be other numbers, unless the store has rounded them before.
_ARRAYS: Final[dict[str, DTypeLike]] = {"prompt_tokens": "<i4", "tokens": "<i4", "logprobs": "<f8"}
_ROWS: Final = TypeAdapter(list[HeldSample])


def pack_held(rows: Sequence[HeldSample]) -> bytes:
    """Packs ``rows`` as MessagePack, with the columns that a user's loss reads. Without rows the result is empty."""
    # One value: as lists, the tokens of a step are more values and bytes than a message may have.
    packed: bytes = msgpack.packb(list(map(_plain, rows))) if rows else b""
    return packed


def _plain(row: HeldSample) -> dict[str, Any]:
    sample = row.sample
    arrays = {name: np.array(getattr(sample, name), dtype).tobytes() for name, dtype in _ARRAYS.items()}
    # asdict alone would copy the tokens one by one.
    plain = asdict(replace(sample, columns={}, prompt_tokens=(), tokens=(), logprobs=())) | arrays
    plain["columns"] = {name: inline_array(values) for name, values in sample.columns.items()}
    return {
        "sample": plain,
        "old_logprobs": row.old_logprobs,
        "advantages": row.advantages,
        "returns": row.returns,
    }


def read_held(packed: bytes | memoryview) -> list[HeldSample]:
    """The inverse of ``pack_held``. Raises ``ValueError`` for data of another kind."""
    if not isinstance(packed, bytes | bytearray | memoryview):
        raise ValueError(f"held samples are bytes, not {type(packed).__name__}")
    rows = msgpack.unpackb(packed) if len(packed) else []
    try:
        for row in rows:
            for name, dtype in _ARRAYS.items():
                row["sample"][name] = np.frombuffer(row["sample"][name], dtype).tolist()
            row["sample"]["columns"] = {
                name: plain_cell(values) for name, values in row["sample"]["columns"].items()
            }
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not held samples: {error!r}") from error
    return _ROWS.validate_python(rows)


def _bytes(figures: NDArray[np.float32] | None) -> bytes:
    return b"" if figures is None else figures.astype(np.float32).tobytes()


def _array(figures: bytes) -> NDArray[np.float32] | None:
    return np.frombuffer(figures, np.float32).copy() if figures else None


def update_of(sample: Sample, updates: int) -> int:
    """The number of the update that trains a sample, from 0, in a step of ``updates``."""
    # By the number of the query's draw: whole groups, of which it is known at their arrival, and in any order of it.
    return sample.query_position % updates


def divide_updates(rows: Iterable[TrainedSample], updates: int) -> list[list[TrainedSample]]:
    """The samples of each update, those of a group together, in an order that does not depend on their arrival."""
    parts: list[list[TrainedSample]] = [[] for _ in range(updates)]
    for row in rows:
        parts[update_of(row.sample, updates)].append(row)
    for part in parts:
        part.sort(key=_order)
    return parts


def _order(row: TrainedSample) -> tuple[int, str]:
    return row.sample.query_position, row.sample.sample_id


def count_tokens(rows: Sequence[TrainedSample]) -> int:
    """Completion tokens of ``rows``."""
    return sum(len(row.sample.tokens) for row in rows)
