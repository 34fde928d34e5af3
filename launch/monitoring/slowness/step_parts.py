"""The parts of a step's time, by the figures that are measured of it. Pure."""

import math
from typing import Literal, get_args

from ....actors.step_metrics import StepMetrics

Part = Literal[
    "rollout only", "rollout and training", "training only", "optimizer", "publishing weights", "other"
]
PARTS: tuple[Part, ...] = get_args(Part)


def split_step(step: StepMetrics) -> tuple[float, ...]:
    """The wall time ``step_s`` of one step, cut into ``PARTS`` (seconds, each >= 0, summing to ``step_s``).

    Measured: ``rollout_s`` and ``overlap_s`` within it. The time after the rollout is divided by the policies' own
    times: backward seconds beyond the overlap, optimizer and publishing, summed over the policies. They are scaled down
    together if they exceed the time, because policies worked in parallel.
    """
    step_s = max(0.0, step.step_s)
    rollout = min(max(0.0, step.rollout_s), step_s)
    both = min(max(0.0, step.overlap_s or 0.0), rollout)
    after = step_s - rollout

    def total_of(figure: str) -> float:
        return math.fsum(max(0.0, figures.get(figure, 0.0)) for figures in step.by_policy.values())

    backward = total_of("backward_s")
    durations = (
        max(0.0, backward - both),
        total_of("optimizer_s"),
        total_of("publish_s"),
    )
    total = math.fsum(durations)
    scale = min(1.0, after / total) if total else 0.0
    training, optimizer, publishing = (seconds * scale for seconds in durations)
    other = max(0.0, after - total)
    return rollout - both, both, training, optimizer, publishing, other
