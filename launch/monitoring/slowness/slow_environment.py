"""Cause: trajectories spend their time in the workflow's own code, its environment or its reward."""

from collections.abc import Iterator
from typing import Final

from .evidence import Evidence
from .finding import Finding

_FULL: Final = 0.8
"""A worker that uses as much of a core computes."""


def slow_environment(evidence: Evidence) -> Iterator[Finding]:
    """By the seconds of trajectories in which no turn is under way. At most the part of the rollout with their share is
    saved: trajectories run at the same time."""
    environment_s, reward_s = (sum(evidence.of_steps(figure)) for figure in ("environment_s", "reward_s"))
    generation_s = sum(
        sum(evidence.values("agent", agent, figure))
        for agent in evidence.names("agent")
        for figure in ("queue_s", "service_s")
    )
    beside_s = environment_s + reward_s
    if not beside_s:
        return
    share = beside_s / (beside_s + generation_s)
    parts = (
        (environment_s, "before and between the turns"),
        (reward_s, "after the last turn, for the reward"),
    )
    words = " and ".join(
        f"{part_s / (beside_s + generation_s):.0%} {place}" for part_s, place in parts if part_s
    )
    remedy, key = _remedy(evidence)
    yield Finding(
        "slow environment",
        share * evidence.parts["rollout only"],
        f"trajectories spend {share:.0%} of their time in code of the recipe: {words}; rollouts are "
        f"{evidence.of_step(evidence.parts['rollout only'])}; {remedy}",
        key,
    )


def _remedy(evidence: Evidence) -> tuple[str, str]:
    """In words, and the key."""
    queue_s, compute_s = (sum(evidence.of_steps(f"reward_{part}_s")) for part in ("queue", "compute"))
    if queue_s > compute_s:
        key = "rewards.processes" if evidence.config.get("rewards.services") else "rollout.processes"
        return f"reward functions wait {queue_s / (queue_s + compute_s):.0%} of their time for a process", key
    for process in evidence.names("process"):
        cpu_s = evidence.values("process", process, "cpu_s") if process.startswith("rollout-") else []
        elapsed_s = evidence.steps[-1].time_s - evidence.steps[0].time_s
        if len(cpu_s) == len(evidence.steps) and elapsed_s > 0.0:
            used = (cpu_s[-1] - cpu_s[0]) / elapsed_s
            if used > _FULL:
                return (
                    f"{process} computes {used:.0%} of the time, and more workers share it",
                    "rollout.workers",
                )
    if evidence.mode != "async":
        return "async generates other trajectories meanwhile", "mode"
    return "more queries at once fill the time", "training.queries_per_step"
