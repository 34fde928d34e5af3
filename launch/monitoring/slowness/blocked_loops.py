"""Cause: code of the recipe blocks the event loop of a rollout worker, so that all its trajectories wait."""

import math
from collections.abc import Iterator
from typing import Final

from ..formatting import duration
from .evidence import Evidence
from .finding import Finding

_LEAST_S: Final = 0.2
"""A busy machine delays a loop by less."""


def blocked_loops(evidence: Evidence) -> Iterator[Finding]:
    """By the longest delays that the workers have measured at the ends of the steps."""
    for process in evidence.names("process"):
        lags = evidence.values("process", process, "loop_lag_ms") if process.startswith("rollout-") else []
        if lags and (seconds := math.fsum(lags) / len(lags) / 1000.0) > _LEAST_S:
            yield Finding(
                "blocked loop",
                seconds,
                f"the event loop of {process} stands still for up to {duration(seconds)} at a time: blocking code of "
                "the recipe belongs in in_process",
            )
