"""The trajectories of a run that have failed, and the share of them that ends it. Pure."""

from ..errors import TooManyFailures
from ..messages import TrajectoryFailure


class Failures:
    """``most_share``: of the trajectories of a step or an evaluation that may fail."""

    def __init__(self, most_share: float) -> None:
        self._most_share = most_share
        self._first: TrajectoryFailure | None = None

    def add(self, failure: TrajectoryFailure) -> None:
        self._first = self._first or failure

    def too_many(self, when: str, failed: int, trajectories: int) -> TooManyFailures | None:
        """The error that ends the run, if more of ``trajectories`` have ``failed`` than may."""
        if failed <= self._most_share * trajectories:
            return None
        first = self._first
        assert first is not None
        return TooManyFailures(
            f"{when}: {failed} of {trajectories} trajectories failed (rollout.max_failed_share allows "
            f"{self._most_share:.0%}); the first of the run, {first.trajectory}: {first.error}\n"
            f"{first.remote_traceback}"
        )
