"""The records of the steps under way."""

from collections.abc import Callable

from ..names import PolicyName, Step, Version
from .recorder import StepRecord


class StepRecords(dict[Step, StepRecord]):
    """``newest``: the newest step that has begun; ``newest_versions``: those that it began with."""

    def __init__(self) -> None:
        super().__init__()
        self.newest = Step(0)
        self.newest_versions: dict[PolicyName, Version] = {}
        self._unrecorded: list[Callable[[StepRecord], None]] = []
        """Notes for the record of the next step, made while none is under way."""

    def begin(self, record: StepRecord, versions: dict[PolicyName, Version]) -> None:
        """A step begins with ``versions``."""
        self[record.step] = record
        self.newest, self.newest_versions = record.step, versions
        for note in self._unrecorded:
            note(record)
        self._unrecorded.clear()

    def note(self, step: Step, note: Callable[[StepRecord], None]) -> None:
        """Has ``note`` change the record of a step under way, else of the newest one, or, between two steps, of the
        next."""
        if (record := self.get(step) or self.get(self.newest)) is None:
            self._unrecorded.append(note)
        else:
            note(record)
