"""Groups that no step waits for, or another than the one that they began in: the step of each. Pure.

    begin ──> loose: a submitted query that begins at once
                │
                ├─ wait:   it lacks nothing but rewards from outside   <── wait: a step's group does
                ├─ admit:  its rewards are there, and a step waits for its samples
                └─ end:    it has ended without samples

    hold ──> open: a step has begun it ── carry_on: it belongs to the next step

A group is named by the step that it began in, and keeps that name; ``step_of`` is the step that it belongs to.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..figures import Numbers
from ..messages import KEPT_STEPS, GroupClosed, GroupWaiting
from ..names import PolicyName, Step, Version
from .rollout_workers import GroupKey


@dataclass(slots=True)
class _Loose:
    """``writer``: the worker's life in which it waits for rewards, empty before that. ``given_up``: its worker knows
    that no step can train it."""

    writer: str = ""
    oldest: dict[PolicyName, Version] = field(default_factory=dict)
    trajectories: int = 0
    given_up: bool = False


class LooseGroups:
    def __init__(self) -> None:
        self._loose: dict[GroupKey, _Loose] = {}
        self._admitted: dict[GroupKey, Step] = {}
        """Groups that belong to another step than the one that they began in, until that one is complete."""
        self._open: dict[Step, dict[str, None]] = {}
        """The queries of open groups that belong to the step that they began in."""

    def __contains__(self, key: GroupKey) -> bool:
        return key in self._loose

    def __len__(self) -> int:
        return len(self._loose)

    def begin(self, key: GroupKey) -> None:
        """A submitted query has begun."""
        self._loose[key] = _Loose()

    def wait(self, writer: str, group: GroupWaiting) -> Step | None:
        """A group lacks nothing but rewards. Returns the step that has waited for it, None if it was loose before."""
        key = group.step, group.query
        step = None if key in self._loose else self.step_of(key)
        self._admitted.pop(key, None)
        self.close(key)
        self._loose[key] = _Loose(writer, group.oldest, group.count)
        return step

    def step_of(self, key: GroupKey) -> Step:
        """The step that the group, which is not loose, belongs to."""
        return self._admitted.get(key, key[0])

    def admit(self, key: GroupKey, step: Step) -> None:
        """``step`` waits for the group's samples."""
        del self._loose[key]
        self._admitted[key] = step

    def is_held(self, key: GroupKey) -> bool:
        """True if the group has been admitted to its step, or passed on into it."""
        return key in self._admitted

    def hold(self, step: Step, queries: Iterable[str]) -> None:
        """The step has begun groups, which belong to it."""
        self._open.setdefault(step, {}).update(dict.fromkeys(queries))

    def close(self, key: GroupKey) -> None:
        """The group has closed, or is loose."""
        self._open.get(key[0], {}).pop(key[1], None)

    def reopen(self, key: GroupKey) -> None:
        """A group that had closed begins again, in the step that it belonged to."""
        if key not in self._admitted:
            self.hold(key[0], [key[1]])

    def carry_on(self, step: Step) -> int:
        """The open groups of the step belong to the next one. Returns their number."""
        queries = self._open.pop(step, {})
        self._admitted |= {(step, query): Step(step + 1) for query in queries}
        return len(queries)

    def end(self, key: GroupKey) -> None:
        """A loose group has ended without samples."""
        del self._loose[key]

    def complete(self, step: Step) -> set[Step]:
        """Forgets groups that belong to ``step``, which is complete. Returns the steps that those began in."""
        over = {key for key, of_step in self._admitted.items() if of_step == step}
        self._admitted = {key: of_step for key, of_step in self._admitted.items() if key not in over}
        self._open.pop(step, None)
        return {began for began, _ in over}

    def open_of(self, step: Step) -> list[str]:
        """The queries of the groups that began in ``step`` and have not ended, or belong to a later one."""
        return [query for began, query in (*self._loose, *self._admitted) if began == step]

    def waiting(self) -> Iterator[tuple[GroupKey, str, dict[PolicyName, Version]]]:
        """The groups that wait for rewards, and may be trained for all that is known: name, writer, and the oldest
        version of the samples, by policy."""
        for key, group in self._loose.items():
            if group.writer and not group.given_up:
                yield key, group.writer, group.oldest

    def give_up(self, key: GroupKey) -> None:
        """No step can train the group any more: its worker is notified."""
        self._loose[key].given_up = True

    def lost(self, key: GroupKey, reason: str) -> GroupClosed | None:
        """The end of a group whose worker was lost while it waited for rewards: it does not begin again, as no step
        waits for it. None if it does."""
        group = self._loose.get(key)
        return None if group is None or not group.writer else self._end_of(key, group, reason)

    def ends(self, reason: str) -> list[GroupClosed]:
        """The ends of all loose groups, for ``reason``."""
        return [self._end_of(key, group, reason) for key, group in self._loose.items()]

    def _end_of(self, key: GroupKey, group: _Loose, reason: str) -> GroupClosed:
        figures: Numbers = {"late_trajectories": group.trajectories}
        return GroupClosed(*key, {}, {}, float("inf"), {}, [], reason, figures=figures)


def is_forgotten_soon(key: GroupKey, newest: Step) -> bool:
    """True if the store may soon refuse samples of the step that the group began in: it keeps those of the last steps.
    ``newest``: the newest step that has begun."""
    return newest - key[0] > KEPT_STEPS
