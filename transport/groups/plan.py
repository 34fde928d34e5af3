"""The plan of a transfer that several processes join: pure, computed by every member from the same inputs.

Each member has rows (of dimension 0) of some tensors and wants rows of some, such as a trainer's shards and an
engine's whole tensors. The plan is a list of steps in one order for all: in each step one member sends rows to
one or several others. All do their steps in this order, so that no two wait for each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from ..errors import StateMismatch
from ..handle import Rows, TensorSpec

Shards = Mapping[str, Rows]
"""By member: the rows that it has or wants, by tensor. A tensor without dimensions is row 0 to 1."""

STEP_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows ``start`` to ``stop`` (not included) of a tensor."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Step:
    """``sender`` sends the ``row_ranges``, one behind the other, to each of ``receivers``. ``number``: in the plan."""

    number: int
    sender: str
    receivers: tuple[str, ...]
    row_ranges: tuple[RowRange, ...]
    size_bytes: int

    def joins(self, member: str) -> bool:
        """True if the member sends or receives in this step."""
        return member == self.sender or member in self.receivers


@dataclass(frozen=True, slots=True)
class Plan:
    """``steps``: in the order for all. ``local_rows``: by member, the rows that it has and wants itself."""

    steps: tuple[Step, ...]
    local_rows: Mapping[str, tuple[RowRange, ...]]


def rows_of(spec: TensorSpec) -> tuple[int, int]:
    """All rows of a tensor."""
    return (0, spec.shape[0] if spec.shape else 1)


def whole(specs: Sequence[TensorSpec]) -> Rows:
    """All rows of all tensors, by name."""
    return {spec.name: rows_of(spec) for spec in specs}


def make_plan(
    key: str, specs: Sequence[TensorSpec], held: Shards, needed: Shards, step_bytes: int = STEP_BYTES
) -> Plan:
    """The plan by which every member gets what it wants, of any member that has it, in steps of ``step_bytes`` (a
    row may be larger).

    Each range of rows is sent once for all that want it; senders share the work evenly. Raises StateMismatch for names
    and rows that no tensor has, and for rows that are wanted and held by no member.
    """
    # By every member, not by one that sends the plan: no member waits for another's word before the first step. So all
    # that is chosen here is chosen in the order of the names, as mappings may come in another order to each.
    _check(key, specs, held, needed)
    sent_bytes = dict.fromkeys(sorted(held), 0)
    local_rows: dict[str, list[RowRange]] = {member: [] for member in needed}
    sending: dict[tuple[str, tuple[str, ...]], list[tuple[RowRange, int]]] = {}
    problems = []
    for spec in specs:
        row_bytes = _row_bytes(spec)
        for row_range in _elementary(spec, held, needed):
            wanting = [member for member in sorted(needed) if _covers(needed[member], row_range)]
            holding = [member for member in sorted(held) if _covers(held[member], row_range)]
            for member in wanting:
                if member in holding:
                    local_rows[member].append(row_range)
            receivers = tuple(member for member in wanting if member not in holding)
            if not receivers:
                continue
            if not holding:
                problems.append(f"{spec.name}: no member has rows {row_range.start} to {row_range.stop}")
                continue
            sender = min(holding, key=lambda member: (sent_bytes[member], member))
            sent_bytes[sender] += (row_range.stop - row_range.start) * row_bytes
            row_ranges = sending.setdefault((sender, receivers), [])
            row_ranges += (
                (part, (part.stop - part.start) * row_bytes)
                for part in _cut(row_range, row_bytes, step_bytes)
            )
    if problems:
        raise StateMismatch(key, problems)
    steps = [
        step
        for (sender, receivers), row_ranges in sending.items()
        for step in _in_steps(sender, receivers, row_ranges, step_bytes)
    ]
    numbered = tuple(replace(step, number=number) for number, step in enumerate(steps))
    return Plan(numbered, {member: tuple(row_ranges) for member, row_ranges in local_rows.items()})


def _check(key: str, specs: Sequence[TensorSpec], held: Shards, needed: Shards) -> None:
    ranges = {spec.name: rows_of(spec) for spec in specs}
    problems = []
    for member, rows in (*held.items(), *needed.items()):
        for name, (start, stop) in rows.items():
            if name not in ranges:
                problems.append(f"{name}: not in the state ({member})")
            elif not ranges[name][0] <= start <= stop <= ranges[name][1]:
                problems.append(f"{name}: no rows {start} to {stop} ({member})")
    if problems:
        raise StateMismatch(key, problems)


def _row_bytes(spec: TensorSpec) -> int:
    rows = rows_of(spec)[1]
    return spec.size_bytes // rows if rows else 0


def _elementary(spec: TensorSpec, held: Shards, needed: Shards) -> Iterator[RowRange]:
    """The rows of a tensor in ranges that each member has or wants as a whole or not at all."""
    ranges = [rows[spec.name] for shards in (held, needed) for rows in shards.values() if spec.name in rows]
    ends = sorted({end for bounds in ranges for end in bounds})
    for start, stop in pairwise(ends):
        yield RowRange(spec.name, start, stop)


def _covers(rows: Rows, row_range: RowRange) -> bool:
    start, stop = rows.get(row_range.tensor, (0, 0))
    return start <= row_range.start and row_range.stop <= stop


def _cut(row_range: RowRange, row_bytes: int, step_bytes: int) -> Iterator[RowRange]:
    rows = max(1, step_bytes // row_bytes) if row_bytes else row_range.stop - row_range.start
    for start in range(row_range.start, row_range.stop, rows):
        yield RowRange(row_range.tensor, start, min(start + rows, row_range.stop))


def _in_steps(
    sender: str, receivers: tuple[str, ...], row_ranges: Sequence[tuple[RowRange, int]], step_bytes: int
) -> Iterator[Step]:
    rows: list[RowRange] = []
    filled = 0
    for row_range, size_bytes in row_ranges:
        if rows and filled + size_bytes > step_bytes:
            yield Step(0, sender, receivers, tuple(rows), filled)
            rows, filled = [], 0
        rows.append(row_range)
        filled += size_bytes
    if rows:
        yield Step(0, sender, receivers, tuple(rows), filled)
