"""The order in which the candidates of a plan are simulated, and the end of the search. Pure.

Each candidate has a bound, which its step can't be shorter than. The first half of the simulations goes to different
splits of the devices, the lowest bound first. Then come the neighbours of the fastest, which differ from it in one
choice, and after them all others. A candidate whose bound is well above the fastest step is never simulated, so that a
search that ends before its limit has proved its answer, as far as the bounds are right.

The simulated steps are a few, with the same lengths for all candidates. If these are short ones, steps are below their
bounds: all bounds are then taken as lower, by the smallest ratio that was seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from .candidates import Candidate

_MARGIN: Final = 0.9
"""Bounds are of long runs: they have to be above the fastest by this factor."""


@dataclass(slots=True)
class Search:
    """``bounds``: seconds, by candidate. ``limit``: of simulations."""

    bounds: dict[Candidate, float]
    limit: int
    seconds: dict[Candidate, float] = field(default_factory=dict)
    refusals: dict[Candidate, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bounds = dict(sorted(self.bounds.items(), key=lambda item: item[1]))

    @property
    def fastest(self) -> Candidate | None:
        """None before the first is simulated."""
        return min(self.seconds, key=self.seconds.__getitem__, default=None)

    @property
    def remaining(self) -> list[Candidate]:
        """Those that may still be faster, the lowest bound first."""
        best_s = min(self.seconds.values(), default=float("inf"))
        ratios = [seconds / self.bounds[candidate] for candidate, seconds in self.seconds.items()]
        scale = _MARGIN * min([1.0, *ratios])
        return [
            candidate
            for candidate, bound in self.bounds.items()
            if bound * scale < best_s and candidate not in self.seconds and candidate not in self.refusals
        ]

    def choose(self) -> Candidate | None:
        """The next to be simulated; None at the end."""
        remaining = self.remaining
        if not remaining or len(self.seconds) >= self.limit:
            return None
        if len(self.seconds) < self.limit // 2:
            splits = {candidate.split for candidate in (*self.seconds, *self.refusals)}
            untried = [candidate for candidate in remaining if candidate.split not in splits]
            return (untried or self._neighbours(remaining) or remaining)[0]
        return (self._neighbours(remaining) or remaining)[0]

    def note(self, candidate: Candidate, seconds: float) -> None:
        """A candidate is simulated."""
        self.seconds[candidate] = seconds

    def refuse(self, candidate: Candidate, reason: str) -> None:
        """A candidate does not fit; its whole split has the same memory and the same places."""
        split = (*candidate.split, candidate.instances)
        self.refusals |= {other: reason for other in self.bounds if (*other.split, other.instances) == split}

    def ranking(self) -> list[tuple[Candidate, float]]:
        """The fastest first."""
        return sorted(self.seconds.items(), key=lambda item: item[1])

    def _neighbours(self, remaining: Sequence[Candidate]) -> list[Candidate]:
        fastest = self.fastest
        return [] if fastest is None else [other for other in remaining if fastest.differences(other) == 1]
