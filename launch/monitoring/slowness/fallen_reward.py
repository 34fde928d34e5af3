"""Cause: the reward has fallen from the best of the newest steps."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, variance
from typing import Final

from ....actors.names import AgentName, Step
from .evidence import Evidence
from .finding import Finding

_STEPS: Final = 5
"""Steps whose mean is compared: a single one says little."""
_MARGIN: Final = 0.25
"""Share of the best mean by which the newest is lower."""
_ERRORS: Final = 4.0
"""Standard errors of the difference that it must exceed too, so that a noisy reward around 0 has not fallen. Not 3: the
best of some forty means is higher than their mean by chance alone."""


def fallen_reward(evidence: Evidence) -> Iterator[Finding]:
    """Compares each agent's newest ``_STEPS`` steps with the best ones that do not overlap them. Names the checkpoint
    to return to, the newest one that is not later than these."""
    for agent in evidence.names("agent"):
        rewards = _rewards(evidence, AgentName(agent))
        if len(rewards) < 2 * _STEPS:
            continue
        newest = [reward for _, reward in rewards[-_STEPS:]]
        spans = [rewards[start : start + _STEPS] for start in range(len(rewards) - 2 * _STEPS + 1)]
        best = max(spans, key=lambda span: fmean(reward for _, reward in span))
        values = [reward for _, reward in best]
        fall = fmean(values) - fmean(newest)
        error = math.sqrt((variance(values) + variance(newest)) / _STEPS)
        if fall > _MARGIN * abs(fmean(values)) and fall > _ERRORS * error:
            first, last = best[0][0], best[-1][0]
            remedy, key = _checkpoint(evidence, last, rewards[-1][0])
            yield Finding(
                "fallen reward",
                None,
                f"the reward of {agent} is {fmean(newest):.3g} in the newest {_STEPS} steps, and was "
                f"{fmean(values):.3g} in steps {first} to {last}: {remedy}",
                key,
            )


def _rewards(evidence: Evidence, agent: AgentName) -> Sequence[tuple[Step, float]]:
    pairs = ((step.step, step.by_agent.get(agent, {}).get("reward")) for step in evidence.steps)
    return [(step, reward) for step, reward in pairs if reward is not None]


def _checkpoint(evidence: Evidence, best: Step, newest: Step) -> tuple[str, str]:
    """The words about the checkpoint to return to, and the setting that would change its fate."""
    every, keep = evidence.config.get("checkpoint.every"), evidence.config.get("checkpoint.keep")
    if not isinstance(every, int) or not isinstance(keep, int) or not 0 < every <= best:
        return "no checkpoint is of a step up to these", "checkpoint.every"
    step = best - best % every
    name = f"step_{step:06}"
    if step > newest - newest % every - every * keep:
        return f"return to the checkpoint {name}, by init_from", ""
    return f"the checkpoint {name} was the one to return to, and is not kept", "checkpoint.keep"
