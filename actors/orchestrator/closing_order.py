"""The queries of the training data that the steps draw, each once, in order; and the order in which their groups close.
Pure."""

from collections import deque
from collections.abc import Sequence
from typing import Literal

from ..errors import RecipeError
from ..messages import GroupClosed
from ..names import Step

GroupOrder = Literal["arrival", "query"]
"""The order in which closed groups are trained: as they close, or as their queries were drawn (deterministic)."""


class QueryOrder:
    """Positions (0, 1, ...) of the training data: steps draw theirs when they begin, and one more for each group that
    is replaced. A saved step is complete before a later one begins to draw, or draws no more: its draws are final."""

    def __init__(self, next_position: int) -> None:
        self._next = next_position
        self._first: dict[Step, int] = {}
        self._ids: dict[Step, set[str]] = {}

    def begin(self, step: Step, count: int) -> range:
        """The positions of a step's queries; steps begin in order."""
        self._first[step] = self._next
        self._ids[step] = set()
        return self.more(count)

    def more(self, count: int) -> range:
        """The next ``count`` positions."""
        first, self._next = self._next, self._next + count
        return range(first, self._next)

    def name(self, step: Step, ids: Sequence[str]) -> None:
        """Raises RecipeError if a query of the step has that id already: their samples would have the same names."""
        for query_id in ids:
            if query_id in self._ids[step]:
                raise RecipeError(f"step {step} has two queries with the id {query_id!r}")
            self._ids[step].add(query_id)

    def end(self, step: Step) -> None:
        """Forgets the step, which draws no more."""
        del self._ids[step]

    def position_after(self, step: Step) -> int:
        """The position from which a run that resumes after ``step`` draws."""
        return self._first.get(Step(step + 1), self._next)


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
