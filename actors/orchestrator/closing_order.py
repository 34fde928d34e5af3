"""The order in which closed groups are trained. Pure."""

from collections import deque
from collections.abc import Sequence
from typing import Literal

from ..messages import GroupClosed
from ..names import Step

GroupOrder = Literal["arrival", "query"]
"""The order in which closed groups are trained: as they close, or as their queries were drawn (deterministic)."""


class ClosingOrder:
    """Under ``query`` a closed group is held until all groups of its step that were begun before it have closed too.
    Then micro-batches consist of the same samples in every run, and still flow while others roll out."""

    def __init__(self, order: GroupOrder) -> None:
        self._holds = order == "query"
        self._begun: dict[Step, deque[str]] = {}
        self._held: dict[tuple[Step, str], GroupClosed] = {}

    def begun(self, step: Step, ids: Sequence[str]) -> None:
        """Adds queries that the step has begun."""
        if not self._holds:
            return
        self._begun.setdefault(step, deque()).extend(ids)

    def closed(self, group: GroupClosed) -> list[GroupClosed]:
        """The groups that may be trained now."""
        if not self._holds:
            return [group]
        self._held[group.step, group.query] = group
        open_ids, released = self._begun[group.step], []
        while open_ids and (group.step, open_ids[0]) in self._held:
            released.append(self._held.pop((group.step, open_ids.popleft())))
        return released

    def lost(self, group: GroupClosed) -> None:
        """A group that was released begins again: it closes first."""
        if not self._holds:
            return
        if self._held.pop((group.step, group.query), None) is None:
            self._begun[group.step].appendleft(group.query)

    def end(self, step: Step) -> None:
        """Forgets the step, whose groups have all closed."""
        self._begun.pop(step, None)
