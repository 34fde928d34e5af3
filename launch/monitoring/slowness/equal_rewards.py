"""Cause: most samples teach nothing, because the rewards of their group are equal."""

import math
from collections.abc import Iterator
from typing import Final

from .evidence import Evidence
from .finding import Finding

_FEW: Final = 0.3


def equal_rewards(evidence: Evidence) -> Iterator[Finding]:
    """Samples that are left out by ``rollout.filters`` are not among those that are trained."""
    for policy in evidence.names("policy"):
        shares = evidence.values("policy", policy, "nonzero_advantage_share")
        if shares and (share := math.fsum(shares) / len(shares)) < _FEW:
            yield Finding(
                "equal rewards",
                None,
                f"{share:.0%} of the samples of {policy} have an advantage; the other trajectories of their queries "
                "got the same rewards",
                "training.trajectories_per_query",
            )
