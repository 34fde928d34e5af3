"""The one sentence that a run's page begins with: what has become better, or what has ended the run. Pure."""

import math
from collections.abc import Sequence
from typing import Final

from ...run.run_endings import evaluated_names
from ..formatting import OF_REWARDS, change, count
from .recorded_run import RecordedRun

_FEWEST: Final = 2
_ENDS_SHARE: Final = 0.05


def headline(run: RecordedRun) -> str:
    """The change of the first figure of the evaluations other than a reward: in a game the mean reward is always 0."""
    steps = count(run.last_step, "step") if run.steps_read else ""
    if run.state == "failed":
        return f"Failed after {steps or 'no step'}"
    evaluations = run.evaluations
    for name in evaluated_names(evaluations):
        values = [metrics[name] for metrics in evaluations.values() if name in metrics]
        if not name.startswith(OF_REWARDS) and len(values) >= _FEWEST:
            form = ".1%" if "accuracy" in name or "success" in name else ".3f"
            return f"{_title(name)} {change(values[0], values[-1], form)} in {steps or 'no step'}"
    if not steps:
        return "No training step has finished"
    rewards = [run.curves[f"reward/{agent}"].values for agent in run.curves.names("reward")]
    if not rewards:
        return f"{steps} finished"
    first, last = (
        sum(sum(part) / len(part) for part in parts) / len(parts)
        for parts in zip(*(_ends(values) for values in rewards), strict=True)
    )
    return f"Mean reward {change(first, last, '.3f')} in {steps}"


def _ends(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The first and the last twentieth, at least one value."""
    size = max(1, math.ceil(_ENDS_SHARE * len(values)))
    return values[:size], values[-size:]


def _title(name: str) -> str:
    return f"{name[:1].upper()}{name[1:]}".replace("_", " ")
