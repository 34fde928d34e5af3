"""The journal's records of what happened to tables: their kinds, their bytes, and the snapshot that replaces them.

A record is MessagePack of plain data, ``[kind, ...]``. Columns of references are packed (``column_refs.py``).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import groupby, islice
from operator import attrgetter, itemgetter
from typing import Any, Final

import msgpack

from ..columns.column_refs import pack_column
from ..errors import StoreError
from .policy_queue import PolicyQueue
from .row import Row
from .schema import Columns
from .table import Table

# Rows of one record of a snapshot.
_CHUNK: Final = 256


class Kind(IntEnum):
    """Kinds of records, each with the values that follow the kind."""

    EPOCH = 1  # epoch
    PUT = 2  # [[agent, columns], ...]
    WRITE = 3  # [[agent, columns], ...]
    COMMIT = 4  # policy, policy version, fences, [[agent, sample ids], ...]
    DISCARD = 5  # [[agent, sample ids], ...]
    CLOSE = 6  # before
    COUNTS = 7  # agent, consumed, discarded
    LAST_COMMIT = 8  # policy, last commit or None
    LOSE = 9  # [[agent, sample ids], ...]


def pack_record(kind: Kind, *what: Any) -> bytes:
    """Raises StoreError for text that is not valid Unicode, and integers of more than 64 bits, in values that no other
    check looks at."""
    try:
        record: bytes = msgpack.packb([int(kind), *what])
    except (ValueError, OverflowError) as error:
        raise StoreError(f"a record can't be packed: {error}") from error
    return record


def packed_columns(columns: Mapping[str, Sequence[Any]], given: Columns | None = None) -> Columns:
    """``columns`` with references packed. ``given``: as they came; columns that came packed are taken as they are."""
    came = {} if given is None else {name: cells for name, cells in given.items() if isinstance(cells, dict)}
    return {name: came[name] if name in came else pack_column(cells) for name, cells in columns.items()}


def ids_by_agent(rows: Iterable[Row]) -> dict[str, list[str]]:
    """The ids of the rows' samples, by agent, in the order of the rows."""
    ids: dict[str, list[str]] = {}
    for row in rows:
        ids.setdefault(row.agent, []).append(row.sample_id)
    return ids


class PolicySnapshot:
    """The state of a policy's queue and tables at the time this is made, as records.

    Rows of several tables are in the order of the queue, so that rows of one version keep it: a put numbers them in the
    order in which they come.
    """

    def __init__(self, queue: PolicyQueue, tables: Sequence[Table]) -> None:
        rows = [row for table in tables for row in table.rows()]
        if len(tables) > 1:
            rows.sort(key=attrgetter("order"))
        self._policy, self._last_commit = queue.policy, queue.last_commit
        self._names = {table.agent: table.schema.names for table in tables}
        self._counts = {table.agent: table.counts() for table in tables}
        self._rows = [
            (row.agent, row.sample_id, row.policy_version, row.query_position, *row.cells) for row in rows
        ]
        self._discarded = ids_by_agent(row for row in rows if row.status == "discarded")
        consumed: dict[int, list[Row]] = {}
        for row in rows:
            if row.optimizer_step is not None:
                consumed.setdefault(row.optimizer_step, []).append(row)
        self._consumed = {version: ids_by_agent(of_version) for version, of_version in consumed.items()}

    def __iter__(self) -> Iterator[bytes]:
        rows = iter(self._rows)
        while chunk := list(islice(rows, _CHUNK)):
            yield pack_record(
                Kind.PUT, [self._part(agent, run) for agent, run in groupby(chunk, itemgetter(0))]
            )
        for version, ids in self._consumed.items():
            yield pack_record(Kind.COMMIT, self._policy, version, (), [*ids.items()])
        if self._discarded:
            yield pack_record(Kind.DISCARD, [*self._discarded.items()])
        for agent, counts in self._counts.items():
            yield pack_record(Kind.COUNTS, agent, counts.consumed, counts.discarded)
        yield pack_record(Kind.LAST_COMMIT, self._policy, self._last_commit)

    def _part(self, agent: str, rows: Iterable[tuple[Any, ...]]) -> tuple[str, Columns]:
        names = ("agent", "sample_id", "policy_version", "query_position", *self._names[agent])
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        del columns["agent"]
        return agent, packed_columns(columns)
