"""The sums of a policy's optimizer step, and the figures that they give."""

from collections.abc import Iterable
from dataclasses import dataclass


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
    values: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def add(self, other: "StepTotals") -> None:
        for name in ("samples", "tokens", "trained_tokens", "loss", "clipped", "deviation", "stale"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.add_values(other.values)

    def add_values(self, sums: Iterable[float]) -> None:
        first, second, third, fourth = (a + b for a, b in zip(self.values, sums, strict=True))
        self.values = first, second, third, fourth

    @property
    def clip_fraction(self) -> float:
        return self.clipped / max(1, self.trained_tokens)

    @property
    def ratio_deviation(self) -> float:
        return self.deviation / max(1, self.trained_tokens)

    @property
    def value_loss(self) -> float:
        return self.values[3] / 2 / max(1, self.tokens)
