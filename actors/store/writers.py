"""The writers of a store: those that are retired, and the reports that came with their puts. Pure.

A writer is one life of a process: it has another name after a restart. A report is that of a group, put together with
the group's samples: once the samples are in the store the report is too, and it stays until the group's step is
complete. If the writer is lost before it has reported the group itself, the report is here.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import msgpack
from pydantic import TypeAdapter

from ..errors import WriterRetired
from ..messages import GroupClosed
from ..names import Step

RETIRE: Final = 18  # writer
REPORT: Final = 19  # writer, report, record of its samples or None

_REPORTS: Final[TypeAdapter[GroupClosed]] = TypeAdapter(GroupClosed)


class Writers:
    def __init__(self) -> None:
        self._retired: dict[str, None] = {}
        self._reports: dict[str, list[GroupClosed]] = {}
        self._lost: dict[str, list[GroupClosed]] = {}

    def check(self, writer: str) -> None:
        """Raises WriterRetired if it is."""
        if writer in self._retired:
            raise WriterRetired(writer)

    def retire(self, writer: str) -> None:
        """Accepts nothing more from the writer."""
        self._retired[writer] = None

    def add(self, writer: str, report: GroupClosed) -> None:
        """Remembers the report of a group that the writer has closed."""
        self._reports.setdefault(writer, []).append(report)

    def remove(self, writer: str, report: GroupClosed) -> None:
        """Takes ``add`` back."""
        self._reports[writer].remove(report)

    def reports(self, writer: str) -> list[GroupClosed]:
        """In the order of the puts."""
        return list(self._reports.get(writer, ()))

    def lose(self, writer: str, groups: Collection[str]) -> set[str]:
        """The samples of these groups, ``{step}:{query}``, are lost: their reports count no more. Returns those that
        have a report; the steps of the others are complete."""
        lost = [report for report in self.reports(writer) if f"{report.step}:{report.query}" in groups]
        for report in lost:
            self.remove(writer, report)
        self._lost.setdefault(writer, []).extend(lost)
        return {f"{report.step}:{report.query}" for report in lost}

    def lost(self, writer: str) -> list[GroupClosed]:
        """The reports of groups that were lost with their writer."""
        return list(self._lost.get(writer, ()))

    @property
    def any_retired(self) -> bool:
        """True if a writer was given up for lost."""
        return bool(self._retired)

    def is_retired(self, writer: str) -> bool:
        """True if the writer was given up for lost."""
        return writer in self._retired

    def forget(self, step: Step, queries: Collection[str] = ()) -> None:
        """Forgets the reports of a step that is complete, but for those of ``queries``."""
        kept = {
            writer: [report for report in of_writer if report.step != step or report.query in queries]
            for writer, of_writer in self._reports.items()
        }
        self._reports = {writer: of_writer for writer, of_writer in kept.items() if of_writer}

    def records(self) -> Iterator[bytes]:
        """The records that lead new writers to this state."""
        yield from (retire_record(writer) for writer in self._retired)
        for writer, reports in self._reports.items():
            yield from (report_record(writer, report, None) for report in reports)


def retire_record(writer: str) -> bytes:
    """The record of a writer's end, for the journal."""
    record: bytes = msgpack.packb([RETIRE, writer])
    return record


def report_record(writer: str, report: GroupClosed, samples: bytes | None) -> bytes:
    """``samples``: the record of the put."""
    record: bytes = msgpack.packb([REPORT, writer, _REPORTS.dump_python(report), samples])
    return record


def report_of(plain: Mapping[str, Any]) -> GroupClosed:
    """The report that a record of the journal has as plain data. Raises pydantic's ValidationError."""
    return _REPORTS.validate_python(plain)
