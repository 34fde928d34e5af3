"""Errors of the command line, run directories and benchmarks."""

from pathlib import Path

from ..core.errors import FlexmarlError, listing


class RunDirectoryError(FlexmarlError):
    """The run directory is missing, in use, or not a run's."""


class Interrupted(FlexmarlError):
    """A signal ended the run at once."""


class LostActor(FlexmarlError):
    """A run has ended because one of its actors was lost; it may continue from its newest checkpoint."""


class ResumeRefused(FlexmarlError):
    """A run can't be resumed as it is: settings or files are no longer those that its checkpoint was made with."""

    def __init__(self, run: Path, problems: list[str]) -> None:
        super().__init__(f"{run} can't be resumed as it is:{listing(problems)}")
        self.run = run
        self.problems = problems


class BenchmarkFailed(FlexmarlError):
    """A measurement failed: it has no result."""
