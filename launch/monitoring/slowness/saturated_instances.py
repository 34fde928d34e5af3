"""Cause: turns wait because all instances of their policy are full."""

import math
from collections.abc import Iterator

from ..formatting import count, duration
from .evidence import Evidence
from .finding import Finding


def saturated_instances(evidence: Evidence) -> Iterator[Finding]:
    """More instances save at most the part of the rollout that is waiting. Waits for a new version are not counted."""
    seconds = {
        policy: tuple(
            math.fsum(evidence.per_step("agent", agent, figure) for agent in agents)
            for figure in ("turns", "queue_s", "service_s")
        )
        for policy, agents in evidence.policies.items()
    }
    whole = math.fsum(queue_s + service_s for _, queue_s, service_s in seconds.values())
    for policy, (turns, queue_s, service_s) in seconds.items():
        if not turns or not whole:
            continue
        instances = evidence.config.get(f"policies.{policy}.instances")
        number, verb = "instances", "are"
        if isinstance(instances, int):
            number, verb = (
                ("only instance", "is") if instances == 1 else (count(instances, "instance"), "are")
            )
        yield Finding(
            "saturated instances",
            queue_s / whole * evidence.parts["rollout only"],
            f"the {number} of {policy} {verb} full: a turn waits {duration(queue_s / turns)} for room, and takes "
            f"{duration(service_s / turns)} then; rollouts are {evidence.of_step(evidence.parts['rollout only'])}",
            f"policies.{policy}.instances",
        )
