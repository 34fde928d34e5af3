"""A row, its statuses and the events that change them, and the queue of READY rows."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final, Literal

from ..errors import ProtocolViolation
from .schema import Cell

Status = Literal["writing", "ready", "leased", "consumed", "discarded"]

Event = Literal[
    "complete",  # its last required column is written
    "lease",
    "give_back",  # its lease has ended without a commit
    "commit",
    "discard",
    "undo_complete",
    "undo_commit",
    "undo_discard",
    "replay_commit",
]

TRANSITIONS: Final[dict[tuple[Status, Event], Status]] = {
    ("writing", "complete"): "ready",
    ("ready", "lease"): "leased",
    ("leased", "give_back"): "ready",
    ("leased", "commit"): "consumed",
    ("writing", "discard"): "discarded",
    ("ready", "discard"): "discarded",
    # A change that could not be journaled is undone. A lease of the row has ended before.
    ("ready", "undo_complete"): "writing",
    ("consumed", "undo_commit"): "leased",
    ("discarded", "undo_discard"): "writing",
    # Leases are in no journal, and a snapshot lacks the columns that were freed when a row was consumed.
    ("ready", "replay_commit"): "consumed",
    ("writing", "replay_commit"): "consumed",
}
"""Status after an event. An event that is not listed for a status is a defect of the store.

A new row is ``ready`` if it is complete, else ``writing``.
"""


@dataclass(slots=True, eq=False)
class Row:
    """``cells``: in the order of the schema of its agent's table. ``order``: its place among the rows of its policy
    with the same version, a number or a tuple. ``optimizer_step``: the one that consumed the row, which is the policy
    version that it made. ``ticket``: of its entry in the queue; 0 if it is not queued."""

    agent: str
    sample_id: str
    step: int
    policy_version: int
    query_position: int
    order: Any
    cells: tuple[Cell, ...]
    status: Status = "writing"
    optimizer_step: int | None = None
    ticket: int = 0

    @property
    def is_over(self) -> bool:
        """True if the row is consumed or discarded: nothing happens to it any more."""
        return self.status in ("consumed", "discarded")


def move(rows: Iterable[Row], event: Event) -> None:
    """Changes the status of rows. Raises ProtocolViolation if ``event`` can't happen to a row of its status."""
    for row in rows:
        try:
            row.status = TRANSITIONS[row.status, event]
        except KeyError:
            raise ProtocolViolation(
                f"sample {row.sample_id} is {row.status}: {event} is impossible"
            ) from None


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows by status; ``consumed`` and ``discarded`` include rows that are forgotten."""

    writing: int
    ready: int
    leased: int
    consumed: int
    discarded: int


class ReadyQueue:
    """READY rows by policy version, each version a heap by ``order``."""

    def __init__(self) -> None:
        # An entry with a ticket that is not its row's any more stays until it is popped; the counts are exact.
        self._heaps: dict[int, list[tuple[Any, int, Row]]] = defaultdict(list)
        self._counts: dict[int, int] = defaultdict(int)
        self._ticket = 0

    def push(self, row: Row) -> None:
        """Adds a row that is ready; its ticket before this one is no longer valid."""
        self._ticket = row.ticket = self._ticket + 1
        heappush(self._heaps[row.policy_version], (row.order, row.ticket, row))
        self._counts[row.policy_version] += 1

    def count(self, first_version: int, last_version: int) -> int:
        """The number of ready rows of these policy versions, both ends included."""
        return sum(
            count for version, count in self._counts.items() if first_version <= version <= last_version
        )

    def take(self, first_version: int, last_version: int, count: int) -> list[Row]:
        """The first ``count`` rows, older versions first. There must be as many."""
        rows: list[Row] = []
        for version in sorted(v for v in self._counts if first_version <= v <= last_version):
            wanted = min(count, len(rows) + self._counts[version])
            taken = wanted - len(rows)
            heap = self._heaps[version]
            while len(rows) < wanted:
                _, ticket, row = heappop(heap)
                if row.ticket == ticket:
                    row.ticket = 0
                    rows.append(row)
            self._subtract(version, taken)
        return rows

    def drop(self, row: Row) -> None:
        """Removes a row that is not READY any more and was not taken."""
        row.ticket = 0
        self._subtract(row.policy_version, 1)

    def _subtract(self, version: int, count: int) -> None:
        self._counts[version] -= count
        if not self._counts[version]:  # the rest of the heap is out of date
            del self._counts[version], self._heaps[version]
