"""The trajectories that make up a query's group, and the moment it is settled. Pure: events in, decisions out.

    start ──> Start x (wanted + extra) ──> trajectories end ──> Close(the first `wanted` that succeeded)
                    ^                            │              or, if no more can come: Close(those that did)
                    └── replacement of a straggler ───┘              or Drop(why), if these are too few

Rules:
- A group closes once, with exactly ``size`` trajectories as soon as so many have succeeded. The rest are its
  oversampled: they are aborted, or run to their end without being used. As a group of their own, the slowest would be
  compared with the slowest alone; and their samples belong to a step whose batch may be trained by then. APRIL
  (arXiv 2509.18521) carries whole groups to the next step.
- A trajectory that fails leaves its place to those still running. One that overran a deadline may be replaced by a new
  one, at most ``max_replacements`` times in a group.
- With fewer than ``size`` left, the group closes with the survivors when the last has ended. It is dropped as soon
  as fewer than ``minimum`` can survive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...errors import ProtocolViolation

Oversampled = Literal["abort", "keep"]


@dataclass(frozen=True, slots=True)
class GroupRules:
    """``size``: trajectories of a group (G). ``extra``: started beyond that. ``minimum``: 1 ... ``size``."""

    size: int
    extra: int = 0
    oversampled: Oversampled = "abort"
    minimum: int = 1
    max_replacements: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    trajectory: int


@dataclass(frozen=True, slots=True)
class Abort:
    trajectory: int


@dataclass(frozen=True, slots=True)
class Close:
    """``trajectories``: in the order of their numbers, whichever ended first."""

    trajectories: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    reason: str


Decision = Start | Abort | Close | Drop


class Group:
    def __init__(self, rules: GroupRules) -> None:
        self._rules = rules
        self._chosen: list[int] = []
        self._running: set[int] = set()
        self._succeeded: list[int] = []
        self._next = 0
        self.replacements = 0
        self.oversampled = 0
        """Trajectories that were still running when the group was settled."""
        self.settled = False

    @property
    def first_size(self) -> int:
        """Trajectories that it begins with."""
        return self._rules.size + self._rules.extra

    def start(self, chosen: Sequence[int] = (), first: int = 0) -> list[Decision]:
        """The group begins: its first trajectories, which have the numbers ``chosen``, and further ones from ``first``
        on; without these all are numbered from 0."""
        self._chosen, self._next = [*chosen], first
        return [self._start() for _ in range(self.first_size)]

    def succeeded(self, trajectory: int) -> list[Decision]:
        """A trajectory has its rewards. Raises ProtocolViolation if it was not running."""
        self._remove(trajectory)
        if self.settled:
            return []
        self._succeeded.append(trajectory)
        return self._settle()

    def failed(self, trajectory: int, *, replacement: bool = False) -> list[Decision]:
        """``replacement``: it is a straggler, which is replaced if the rules allow one more."""
        self._remove(trajectory)
        if self.settled:
            return []
        if replacement and self.replacements < self._rules.max_replacements:
            self.replacements += 1
            return [self._start()]
        return self._settle()

    def give_up(self, reason: str) -> list[Decision]:
        """No step can train the group any more."""
        return [] if self.settled else self._end(Drop(reason))

    def _start(self) -> Start:
        if self._chosen:
            number = self._chosen.pop(0)
        else:
            number, self._next = self._next, self._next + 1
        self._running.add(number)
        return Start(number)

    def _remove(self, trajectory: int) -> None:
        if trajectory not in self._running:
            raise ProtocolViolation(f"trajectory {trajectory} ended, which was not running")
        self._running.discard(trajectory)

    def _settle(self) -> list[Decision]:
        survivors, rules = len(self._succeeded), self._rules
        # First, and while others still run: they can't save the group any more, and would only take time at instances.
        if survivors + len(self._running) < rules.minimum:
            return self._end(
                Drop(f"{survivors} trajectories survived, rollout.min_trajectories={rules.minimum}")
            )
        if survivors == rules.size or not self._running:
            # By number: the order of arrival would show in sums of floats, and in the order in which rows are trained.
            return self._end(Close(tuple(sorted(self._succeeded))))
        return []

    def _end(self, verdict: Close | Drop) -> list[Decision]:
        self.settled = True
        self.oversampled = len(self._running)
        # ``keep`` is for trajectories beyond those that are needed; of a dropped group none is.
        stopped = self._rules.oversampled == "abort" or isinstance(verdict, Drop)
        return [*(Abort(number) for number in sorted(self._running) if stopped), verdict]
