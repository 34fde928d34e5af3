"""Sentences about policies that learn nothing, though their run seems well: every advantage is zero, or no sample is
trained. Pure: takes the metrics of each step."""

from collections.abc import Iterator
from typing import Final

from ....actors.figures import Numbers
from ....actors.names import PolicyName
from ....actors.step_metrics import StepMetrics

FIRST_STEPS: Final = 5
"""Steps in a row before the first sentence. Fewer happen by chance in sound runs: small batches, hard queries."""


class LearningWatch:
    """The steps in a row in which each policy has learned nothing. A policy is named once more after twice as many of
    them, and so on: a run of thousands of steps keeps a readable console."""

    def __init__(self) -> None:
        self._idle_steps: dict[PolicyName, int] = {}
        self._next: dict[PolicyName, int] = {}

    def warnings(self, metrics: StepMetrics) -> Iterator[str]:
        """The sentences that are due after a step."""
        for policy in metrics.versions:
            reason = _reason(metrics, metrics.by_policy.get(policy, {}))
            if not reason:
                self._idle_steps[policy], self._next[policy] = 0, FIRST_STEPS
                continue
            steps = self._idle_steps[policy] = self._idle_steps.get(policy, 0) + 1
            if steps >= self._next.get(policy, FIRST_STEPS):
                self._next[policy] = 2 * steps
                yield f"policy {policy} has learned nothing in the last {steps} steps: {reason}"


def _reason(metrics: StepMetrics, figures: Numbers) -> str:
    """The reason why a policy with these figures has learned nothing in the step; empty if it has learned."""
    if figures.get("carried_samples"):
        return ""  # collects its batch
    if not figures.get("samples"):
        dropped = int(metrics.figures.get("dropped_groups", 0))
        counts = ", ".join(f"{name} {count:.0f}" for name, count in metrics.filters.items())
        return f"no sample of it was trained. In the newest step {dropped} groups were dropped" + (
            f", and filters left samples out: {counts}" if counts else ""
        )
    if figures.get("nonzero_advantage_share") == 0.0:
        return (
            "every advantage was 0. The trajectories of a query must get different rewards: see them by flexmarl "
            "samples, take queries that are neither too easy nor too hard, or raise training.trajectories_per_query"
        )
    # A step of several updates may leave out one of them: then its mean norm is above zero.
    if figures.get("skipped_updates") and not figures.get("grad_norm"):
        return "its gradient was zero or not finite, and its weights were left as they were"
    return ""
