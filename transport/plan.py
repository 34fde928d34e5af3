"""The plan of a transfer that several processes join: pure, computed by every member from the same inputs.

Each member has rows (of dimension 0) of some tensors and wants rows of some, such as a trainer's shards and an
engine's whole tensors. The plan is a list of steps in one order for all: in each step one member sends one bucket to
one or several others. All do their steps in this order, so that no two wait for each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from .errors import StateMismatch
from .handle import Rows, TensorSpec

Shards = Mapping[str, Rows]
"""By member: the rows that it has or wants, by tensor. A tensor without dimensions is row 0 to 1."""

BUCKET_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``start`` to ``stop`` (not included) of a tensor."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Step:
    """``sender`` sends the ``pieces``, one behind the other, to each of ``receivers``. ``bucket``: its number."""

    bucket: int
    sender: str
    receivers: tuple[str, ...]
    pieces: tuple[Piece, ...]
    size_bytes: int

    def joins(self, member: str) -> bool:
        return member == self.sender or member in self.receivers


@dataclass(frozen=True, slots=True)
class Plan:
    """``steps``: in the order for all. ``local_pieces``: by member, the pieces that it has and wants itself."""

    steps: tuple[Step, ...]
    local_pieces: Mapping[str, tuple[Piece, ...]]


def rows_of(spec: TensorSpec) -> tuple[int, int]:
    """All rows of a tensor."""
    return (0, spec.shape[0] if spec.shape else 1)


def whole(specs: Sequence[TensorSpec]) -> Rows:
    return {spec.name: rows_of(spec) for spec in specs}


def make_plan(
    key: str, specs: Sequence[TensorSpec], held: Shards, needed: Shards, bucket_bytes: int = BUCKET_BYTES
) -> Plan:
    """The plan by which every member gets what it wants, of any member that has it, in buckets of ``bucket_bytes`` (a
    row may be larger).

    Each piece is sent once for all that want it; senders share the work evenly. Raises StateMismatch for names and rows
    that no tensor has, and for rows that are wanted and held by no member.
    """
    _check(key, specs, held, needed)
    sent_bytes = dict.fromkeys(sorted(held), 0)
    local_pieces: dict[str, list[Piece]] = {member: [] for member in needed}
    sending: dict[tuple[str, tuple[str, ...]], list[tuple[Piece, int]]] = {}
    problems = []
    for spec in specs:
        row_bytes = _row_bytes(spec)
        for piece in _elementary(spec, held, needed):
            wanting = [member for member in sorted(needed) if _covers(needed[member], piece)]
            holding = [member for member in sorted(held) if _covers(held[member], piece)]
            for member in wanting:
                if member in holding:
                    local_pieces[member].append(piece)
            receivers = tuple(member for member in wanting if member not in holding)
            if not receivers:
                continue
            if not holding:
                problems.append(f"{spec.name}: no member has rows {piece.start} to {piece.stop}")
                continue
            sender = min(holding, key=lambda member: (sent_bytes[member], member))
            sent_bytes[sender] += (piece.stop - piece.start) * row_bytes
            pieces = sending.setdefault((sender, receivers), [])
            pieces += (
                (part, (part.stop - part.start) * row_bytes) for part in _cut(piece, row_bytes, bucket_bytes)
            )
    if problems:
        raise StateMismatch(key, problems)
    steps = [
        step
        for (sender, receivers), pieces in sending.items()
        for step in _in_buckets(sender, receivers, pieces, bucket_bytes)
    ]
    numbered = tuple(replace(step, bucket=number) for number, step in enumerate(steps))
    return Plan(numbered, {member: tuple(pieces) for member, pieces in local_pieces.items()})


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


def _elementary(spec: TensorSpec, held: Shards, needed: Shards) -> Iterator[Piece]:
    """The rows of a tensor in pieces that each member has or wants as a whole or not at all."""
    ranges = [rows[spec.name] for shards in (held, needed) for rows in shards.values() if spec.name in rows]
    ends = sorted({end for bounds in ranges for end in bounds})
    for start, stop in pairwise(ends):
        yield Piece(spec.name, start, stop)


def _covers(rows: Rows, piece: Piece) -> bool:
    start, stop = rows.get(piece.tensor, (0, 0))
    return start <= piece.start and piece.stop <= stop


def _cut(piece: Piece, row_bytes: int, bucket_bytes: int) -> Iterator[Piece]:
    rows = max(1, bucket_bytes // row_bytes) if row_bytes else piece.stop - piece.start
    for start in range(piece.start, piece.stop, rows):
        yield Piece(piece.tensor, start, min(start + rows, piece.stop))


def _in_buckets(
    sender: str, receivers: tuple[str, ...], pieces: Sequence[tuple[Piece, int]], bucket_bytes: int
) -> Iterator[Step]:
    bucket: list[Piece] = []
    filled = 0
    for piece, size_bytes in pieces:
        if bucket and filled + size_bytes > bucket_bytes:
            yield Step(0, sender, receivers, tuple(bucket), filled)
            bucket, filled = [], 0
        bucket.append(piece)
        filled += size_bytes
    if bucket:
        yield Step(0, sender, receivers, tuple(bucket), filled)
