"""Cause: training waits for states that move to the slots of a shared pool, after the rollouts."""

import math
from collections.abc import Iterator

from ..formatting import duration
from .evidence import Evidence
from .finding import Finding


def late_swaps(evidence: Evidence) -> Iterator[Finding]:
    """Moves during rollouts, or beside the micro-batches of another policy, cost nothing."""
    seconds = math.fsum(evidence.of_steps("swap_s")) / len(evidence.steps)
    moving_s = {
        policy: evidence.per_step("policy", policy, "pool_swapping_s") for policy in evidence.names("policy")
    }
    if not seconds or not moving_s:
        return
    longest = max(moving_s, key=lambda policy: moving_s[policy])
    yield Finding(
        "late swaps",
        seconds,
        f"after the rollouts training waits {evidence.of_step(seconds)} for states that move to the slots of the pool "
        f"and from them; {longest} is on its way for {duration(moving_s[longest])}, suspended "
        f"{evidence.per_step('policy', longest, 'suspensions'):.2g} times a step; with more slots policies stay",
        "pool.slots",
    )
