"""A reason for slowness, or for learning little."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """``seconds_per_step``: the most that a step would be shorter without the cause; None for a cause that costs
    learning. ``key``: the setting that would change it; empty without one."""

    cause: str
    seconds_per_step: float | None
    sentence: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.sentence} [{self.key}]" if self.key else self.sentence
