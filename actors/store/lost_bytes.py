"""Rows whose bytes were in memory of another node than the store's, and are lost with their writer. Pure."""

from collections.abc import Iterable

from ..columns.column_refs import segments
from ..errors import SamplesLost
from ..messages import LeasedBatch
from ..sample_id import SampleId
from ..segments.segments import is_remote
from .policy_queue import PolicyQueue
from .row import Row
from .segment_arena import SegmentArena, writer_of
from .tables import Tables
from .writers import Writers


def lost_rows(tables: Tables, arena: SegmentArena, writers: Writers, writer: str) -> dict[str, list[str]]:
    """Sample ids, by agent, of the groups that have to begin again, now that ``writer`` is retired: nothing of them was
    trained, and their steps are not complete. Their reports count no more."""
    touched = {_group(one) for ids in tables.rows_in(arena.of_writer(writer)).values() for one in ids}
    rows = [row for row in _rows_of_steps(tables, touched) if _group(row.sample_id) in touched]
    begun = {_group(row.sample_id) for row in rows if row.status in ("leased", "consumed")}
    again = writers.lose(writer, touched - begun)
    lost: dict[str, list[str]] = {}
    for row in rows:
        if _group(row.sample_id) in again:
            lost.setdefault(row.agent, []).append(row.sample_id)
    return lost


def _rows_of_steps(tables: Tables, groups: Iterable[str]) -> list[Row]:
    """All rows of the steps of ``groups``."""
    steps = {int(group.partition(":")[0]) for group in groups}
    return [
        row for agent in tables.counts() for step in steps for row in tables.table(agent).rows_of_step(step)
    ]


def check(writers: Writers, queue: PolicyQueue, batch: LeasedBatch) -> None:
    """Raises SamplesLost, and gives the lease back, if the bytes of its rows are lost."""
    if not writers.any_retired:
        return
    names = {name for column in batch.columns.values() for name in segments(column)}
    for writer in {writer_of(name) for name in names if is_remote(name)}:
        if writers.is_retired(writer):
            queue.give_back(batch.fence, "its samples are lost")
            raise SamplesLost(
                f"policy {queue.policy}: samples in memory of the host of {writer} are lost, and others of their "
                "groups are trained already: the run can continue from its last checkpoint"
            )


def _group(sample_id: str) -> str:
    return SampleId.parse(sample_id).group
