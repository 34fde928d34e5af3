"""Which queries of the training data the steps draw, each once, in order; and the order in which their groups close.
Pure."""

from collections import deque
from collections.abc import Sequence

from ..errors import RecipeError
from ..messages import GroupClosed


class QueryOrder:
    """Positions (0, 1, ...) of the training data: steps draw theirs when they begin, and more where groups are
    dropped. A step that is saved is over before a later one begins to draw, or draws no more: what was drawn
    until then is drawn for good."""

    def __init__(self, next_position: int) -> None:
        self._next = next_position
        self._first: dict[int, int] = {}
        self._ids: dict[int, set[str]] = {}

    def begin(self, step: int, count: int) -> range:
        """The positions of a step's queries; steps begin in order."""
        self._first[step] = self._next
        self._ids[step] = set()
        return self.more(count)

    def more(self, count: int) -> range:
        """The next ``count`` positions."""
        first, self._next = self._next, self._next + count
        return range(first, self._next)

    def name(self, step: int, ids: Sequence[str]) -> None:
        """Raises RecipeError where a query of the step has that id already: their samples would have the same names."""
        for query_id in ids:
            if query_id in self._ids[step]:
                raise RecipeError(f"step {step} has two queries with the id {query_id!r}")
            self._ids[step].add(query_id)

    def end(self, step: int) -> None:
        """The step draws no more."""
        del self._ids[step]

    def position_after(self, step: int) -> int:
        """Where a run that goes on after ``step`` draws first."""
        return self._first.get(step + 1, self._next)


class ClosingOrder:
    """``deterministic``: a group that has closed is held until all that were begun before it, in its step, have
    closed too. Then micro-batches are made of the same samples in every run, and still flow while others roll out."""

    def __init__(self, deterministic: bool) -> None:
        self._deterministic = deterministic
        self._begun: dict[int, deque[str]] = {}
        self._held: dict[tuple[int, str], GroupClosed] = {}

    def begun(self, step: int, ids: Sequence[str]) -> None:
        """The step has begun with these queries, or goes on with them."""
        if not self._deterministic:
            return
        self._begun.setdefault(step, deque()).extend(ids)

    def closed(self, group: GroupClosed) -> list[GroupClosed]:
        """The groups whose turn has come."""
        if not self._deterministic:
            return [group]
        self._held[group.step, group.query] = group
        open_ids, released = self._begun[group.step], []
        while open_ids and (group.step, open_ids[0]) in self._held:
            released.append(self._held.pop((group.step, open_ids.popleft())))
        return released

    def end(self, step: int) -> None:
        """All groups of the step have closed."""
        self._begun.pop(step, None)
