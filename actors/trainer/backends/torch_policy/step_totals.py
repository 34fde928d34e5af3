"""The sums of a policy's optimizer step, and the figures that they give."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from .gang_rank import GangRank

_ADDED: Final = (
    "samples", "tokens", "trained_tokens", "loss", "clipped", "deviation", "unsure", "stale", "positions", "padding",
)  # fmt: skip


@dataclass(slots=True)
class StepTotals:
    """Sums over the micro-batches of this step. ``values``: see ``value_sums``. ``unsure``: tokens, see
    ``Truncations``. ``stale``: samples of an older version. ``positions``: of the forwards' inputs, of which
    ``padding`` are."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    loss: float = 0.0
    clipped: float = 0.0
    deviation: float = 0.0
    unsure: float = 0.0
    stale: int = 0
    positions: int = 0
    padding: int = 0
    values: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def add(self, other: "StepTotals") -> None:
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.add_values(other.values)

    def add_values(self, sums: Iterable[float]) -> None:
        first, second, third, fourth = (a + b for a, b in zip(self.values, sums, strict=True))
        self.values = first, second, third, fourth

    def sum_over(self, gang: GangRank, device: torch.device) -> None:
        """Adds up the sums that each rank has of its own samples; the counts are those of the step already."""
        own = (
            self.loss, self.clipped, self.deviation, self.unsure,
            self.trained_tokens, self.positions, self.padding, *self.values,
        )  # fmt: skip
        sums = gang.sum(torch.tensor(own, dtype=torch.float64, device=device)).tolist()
        self.loss, self.clipped, self.deviation, self.unsure = sums[:4]
        self.trained_tokens, self.positions, self.padding = map(int, sums[4:7])
        self.values = sums[7], sums[8], sums[9], sums[10]

    @property
    def clip_fraction(self) -> float:
        return self.clipped / max(1, self.trained_tokens)

    @property
    def ratio_deviation(self) -> float:
        return self.deviation / max(1, self.trained_tokens)

    @property
    def padding_share(self) -> float | None:
        return self.padding / self.positions if self.positions else None

    @property
    def value_loss(self) -> float:
        return self.values[3] / 2 / max(1, self.tokens)
