"""The groups of the next step that are there before it begins, and the places that it leaves to others. Pure.

admit:   a loose group has its rewards ──┐
pass_on: the step before was rolled out ─┴─> open ─ close ─> closed ──> take: the step begins with all of them
                                              ^               │
                                              └── reopen ─────┘        release: it is loose again
"""

from ..names import PolicyName


class NextGroups:
    """``queries``: those of a step."""

    def __init__(self, queries: int) -> None:
        self._most_places = queries - 1
        self._begun_at_once = 0
        """The number of places that submitted queries have still to take of the steps that begin."""
        self._samples: list[dict[PolicyName, int] | None] = []
        """The samples of each group, None before it has closed."""
        self._passed_on = 0

    def __bool__(self) -> bool:
        """True if a group is there."""
        return bool(self._samples)

    @property
    def passed_on(self) -> int:
        """The number of groups that the step before has passed on."""
        return self._passed_on

    @property
    def places(self) -> int:
        """The places that the step leaves to groups which have begun already: not all, since such groups may never have
        samples."""
        return min(self._begun_at_once, self._most_places)

    @property
    def has_place(self) -> bool:
        """True if fewer loose groups have been admitted than the step leaves places."""
        return len(self._samples) - self._passed_on < self.places

    def submit(self, count: int) -> None:
        """Submitted queries have begun. They take places of the steps that begin."""
        self._begun_at_once += count

    def admit(self) -> None:
        """The step waits for a loose group, whose rewards are there."""
        self._samples.append(None)

    def pass_on(self, count: int) -> None:
        """The step before was rolled out with ``count`` open groups."""
        self._samples += [None] * count
        self._passed_on += count

    def close(self, samples: dict[PolicyName, int]) -> bool:
        """One of the groups has closed. False if none is open: the group is of another step."""
        if None not in self._samples:
            return False
        self._samples[self._samples.index(None)] = samples
        return True

    def reopen(self, samples: dict[PolicyName, int]) -> None:
        """A group that had closed with ``samples`` begins again."""
        self._samples[self._samples.index(samples)] = None

    def release(self) -> bool:
        """One of the groups is loose again. False if none is open: the group is of another step."""
        if None not in self._samples:
            return False
        self._samples.remove(None)
        return True

    def take(self) -> list[dict[PolicyName, int] | None]:
        """The step begins: its groups, and the places of ``places`` are taken. The step after it is the next one."""
        samples, self._samples, self._passed_on = self._samples, [], 0
        self._begun_at_once -= self.places
        return samples
