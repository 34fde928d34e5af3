"""Samples that wait in the trainer for the end of their step, and the division of a step into updates.

A step of several updates takes one optimizer step for each of them. The gradient of the first is accumulated while the
rollout still runs. Samples of the others are held, with the figures of the policy at the step's begin that their loss
needs: these are computed when they arrive, as the first optimizer step changes the weights. The alternatives cost more:
a copy of the weights is a whole model, and a forward behind the rollout is time in which nothing else is computed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....messages import Sample
from .forward_batches import TrainedSample


@dataclass(frozen=True, slots=True)
class HeldSample:
    """``old_logprobs``, and ``advantages`` and ``returns`` of a critic: see ``TrainedSample``; float32, empty if there
    are none. Bytes, because they travel with a policy that is suspended."""

    sample: Sample
    old_logprobs: bytes = b""
    advantages: bytes = b""
    returns: bytes = b""

    @classmethod
    def of(cls, row: TrainedSample) -> "HeldSample":
        """Without an advantage that is known whenever the sample is."""
        advantages = b"" if isinstance(row.advantage, float) else row.advantage.tobytes()
        return cls(row.sample, _bytes(row.old_logprobs), advantages, _bytes(row.returns))

    def trained(self, advantage: float) -> TrainedSample:
        """``advantage``: of the sample as it comes, for one without a critic's."""
        advantages = _array(self.advantages)
        return TrainedSample(
            self.sample,
            advantage if advantages is None else advantages,
            _array(self.old_logprobs),
            _array(self.returns),
        )


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
