"""The sums of a policy's optimizer step, and the figures that they give."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class StepTotals:
    """Sums over the micro-batches of this step. ``values``: see ``value_sums``. ``stale``: samples of an older
    version."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    loss: float = 0.0
    clipped: float = 0.0
    deviation: float = 0.0
    stale: int = 0
    values: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))

    def add(self, other: "StepTotals") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def clip_fraction(self) -> float:
        return self.clipped / max(1, self.trained_tokens)

    @property
    def ratio_deviation(self) -> float:
        return self.deviation / max(1, self.trained_tokens)

    @property
    def value_loss(self) -> float:
        return float(self.values[3]) / 2 / max(1, self.tokens)
