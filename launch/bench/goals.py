"""Goals of the figures of a benchmark, and the verdicts on them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure and its bound. If ``bare`` is given, it is the key of another figure, shown as ``bare_words``, and the
    bound is a multiple of that figure."""

    key: str
    words: str
    bound: float
    at_most: bool
    bare: str | None = None
    bare_words: str = "bare"

    @property
    def text(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{sign} {self.bound:g}x {self.bare_words}" if self.bare else f"{sign} {self.bound:,g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``ratio``: measured / bare; None without a bare figure."""

    key: str
    words: str
    measured: float
    bare: float | None
    ratio: float | None
    goal: str
    met: bool


def judge(goals: Iterable[Goal], figures: Mapping[str, float]) -> list[Verdict]:
    """Compares ``figures`` with each of ``goals``."""
    return [_verdict(goal, figures) for goal in goals]


def _verdict(goal: Goal, figures: Mapping[str, float]) -> Verdict:
    measured = figures[goal.key]
    bare = None if goal.bare is None else figures[goal.bare]
    ratio = None if bare is None else measured / bare
    value = measured if ratio is None else ratio
    met = value <= goal.bound if goal.at_most else value >= goal.bound
    shown_ratio = None if ratio is None else round(ratio, 3)
    return Verdict(goal.key, goal.words, measured, bare, shown_ratio, goal.text, met)
