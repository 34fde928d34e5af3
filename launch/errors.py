"""Errors of a run's command line, folder and benchmarks."""

from ..core.errors import FlexmarlError


class RunDirectoryError(FlexmarlError):
    """The run directory can't be used as asked."""


class Interrupted(FlexmarlError):
    """A signal ended the run before its actors could."""


class BenchmarkFailed(FlexmarlError):
    """A measurement went wrong, so that there is no figure to show."""
