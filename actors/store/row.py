"""A row, the queue of the rows that are READY, and what is told of rows."""

from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple

from .schema import Cell

Status = Literal["writing", "ready", "leased", "consumed", "discarded"]


@dataclass(slots=True, eq=False)
class Row:
    """``cells``: in the schema's order. ``order``: its place among the rows of its version, a number or a tuple.
    ``optimizer_step``: the one that consumed it. ``ticket``: of its entry in the queue; 0: it is not queued."""

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
        return self.status in ("consumed", "discarded")


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows by status; ``consumed`` and ``discarded`` count those that are forgotten too."""

    writing: int
    ready: int
    leased: int
    consumed: int
    discarded: int


class Commit(NamedTuple):
    """What an optimizer step consumed: ``rows`` rows that were leased under ``tokens`` (sorted)."""

    optimizer_step: int
    tokens: tuple[int, ...]
    rows: int


@dataclass(slots=True)
class ActiveLease:
    """A lease that is out."""

    consumer: str
    deadline: float
    rows: list[Row]


class EndedRows(NamedTuple):
    """Rows that were consumed or discarded, and what brings them back: their cells, of which those that were bulk are
    gone, and the leases they were under."""

    rows: list[Row]
    cells: list[tuple[Cell, ...]]
    leases: dict[int, ActiveLease]
    last_commit: Commit | None


class ReadyQueue:
    """READY rows by policy version, each version a heap by ``order``."""

    def __init__(self) -> None:
        # An entry whose ticket is not its row's any more stays until it comes up; the counts are exact.
        self._heaps: dict[int, list[tuple[Any, int, Row]]] = defaultdict(list)
        self._counts: dict[int, int] = defaultdict(int)
        self._ticket = 0

    def push(self, row: Row) -> None:
        self._ticket = row.ticket = self._ticket + 1
        heappush(self._heaps[row.policy_version], (row.order, row.ticket, row))
        self._counts[row.policy_version] += 1

    def count(self, first_version: int, last_version: int) -> int:
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
            self._left(version, taken)
        return rows

    def drop(self, row: Row) -> None:
        """A row that is READY no more, though it was not taken."""
        row.ticket = 0
        self._left(row.policy_version, 1)

    def _left(self, version: int, count: int) -> None:
        self._counts[version] -= count
        if not self._counts[version]:  # what is left in the heap is out of date
            del self._counts[version], self._heaps[version]
