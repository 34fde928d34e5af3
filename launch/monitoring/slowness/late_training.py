"""Cause: rollouts wait for training that runs after the last trajectory of a step."""

import math
from collections.abc import Iterator

from ....actors.names import PolicyName
from ..formatting import duration
from .evidence import Evidence
from .finding import Finding


def late_training(evidence: Evidence) -> Iterator[Finding]:
    """Training that overlaps the rollouts costs nothing, and the waits for states that move are a cause of their
    own."""
    swap_s = math.fsum(evidence.of_steps("swap_s")) / len(evidence.steps)
    seconds = max(0.0, evidence.parts["training only"] + evidence.parts["optimizer"] - swap_s)
    own_seconds = {
        policy: evidence.per_step("policy", policy, "backward_s")
        + evidence.per_step("policy", policy, "optimizer_s")
        for policy in map(PolicyName, evidence.names("policy"))
    }
    if not own_seconds:
        return
    slowest = max(own_seconds, key=lambda policy: own_seconds[policy])
    key, remedy = _remedy(evidence, slowest)
    yield Finding(
        "late training",
        seconds,
        f"training after the last trajectory is {evidence.of_step(seconds)}; {slowest} takes most of it, "
        f"{duration(own_seconds[slowest])} with the waits of its optimizer step; {remedy}",
        key,
    )


def _remedy(evidence: Evidence, policy: PolicyName) -> tuple[str, str]:
    """The key, and its effect in words."""
    match evidence.mode:
        case "sync":
            return "mode", "strict trains during the rollouts"
        case "strict":
            return "mode", "async trains during the rollouts of the next step"
    return f"policies.{policy}.trainer.ranks", "more ranks share it"
