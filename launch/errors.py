"""Errors of the command line, run directories and benchmarks."""

from ..core.errors import FlexmarlError


class RunDirectoryError(FlexmarlError):
    """The run directory is missing, in use, or not a run's."""


class Interrupted(FlexmarlError):
    """A signal ended the run at once."""


class BenchmarkFailed(FlexmarlError):
    """A measurement failed: it has no result."""
