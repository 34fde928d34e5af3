"""The trajectories of a run that have failed, and the share of them that ends it. Pure."""

from collections.abc import Sequence

from ..errors import TooManyFailures
from ..messages import TrajectoryFailure
from ..names import Step
from ..run_events import TrajectoryFailed


class Failures:
    """``most_share``: of the trajectories of a step or an evaluation that may fail."""

    def __init__(self, most_share: float) -> None:
        self._most_share = most_share
        self._first: TrajectoryFailure | None = None

    def add(
        self, failures: Sequence[TrajectoryFailure], step: Step, *, count: bool = True
    ) -> list[TrajectoryFailed]:
        """The events of ``failures``. ``count``: they may end the run."""
        if count and failures:
            self._first = self._first or failures[0]
        return [
            TrajectoryFailed(step, failure.trajectory, failure.error, failure.remote_traceback)
            for failure in failures
        ]

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
