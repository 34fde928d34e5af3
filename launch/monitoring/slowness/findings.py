"""All causes of slowness, and of learning little. A new cause is a module and a row here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from ....actors.step_metrics import StepMetrics
from .blocked_loops import blocked_loops
from .captured_policy import captured_policy
from .drifting_probabilities import drifting_probabilities
from .equal_rewards import equal_rewards
from .evidence import Evidence
from .fallen_reward import fallen_reward
from .falling_entropy import falling_entropy
from .finding import Finding
from .late_groups import late_groups
from .late_swaps import late_swaps
from .late_training import late_training
from .saturated_instances import saturated_instances
from .slow_environment import slow_environment
from .slow_installs import slow_installs

LEAST_STEPS: Final = 5
"""Steps after the first one, without which nothing is said: single steps differ for no reason that a setting would
change."""

_Cause = Callable[[Evidence], Iterator[Finding]]
# With each cause the least share of a step that it costs, and is worth a sentence; 0 for a cause that judges itself.
_CAUSES: Final[Sequence[tuple[_Cause, float]]] = (
    (saturated_instances, 0.1),
    (late_training, 0.25),
    (late_groups, 0.3),
    (late_swaps, 0.1),
    (slow_environment, 0.1),
    (slow_installs, 0.1),
    (blocked_loops, 0.1),
    (equal_rewards, 0.0),
    (captured_policy, 0.0),
    (drifting_probabilities, 0.0),
    (falling_entropy, 0.0),
    (fallen_reward, 0.0),
)
_LONGEST: Final = {
    "rollout only": "rollouts",
    "rollout and training": "rollouts, with training during them,",
    "training only": "training",
    "optimizer": "optimizer steps",
    "publishing weights": "publishing weights",
    "other": "the time between rollout and training",
}


def findings(steps: Sequence[StepMetrics], config: Mapping[str, Any]) -> list[Finding]:
    """The findings about a run's newest steps, the most expensive first, those about learning last. ``config``: by
    dotted key. Empty for a run of a few steps; a run without a cause that a setting would change has one finding, its
    longest part."""
    evidence = Evidence(steps, config)
    if len(evidence.steps) < LEAST_STEPS:
        return []
    causes = [
        finding
        for cause, share in _CAUSES
        for finding in cause(evidence)
        if finding.seconds_per_step is None or finding.seconds_per_step > share * evidence.step_s
    ]
    if all(finding.seconds_per_step is None for finding in causes):
        causes.append(_longest_part(evidence))
    return sorted(causes, key=lambda finding: -(finding.seconds_per_step or 0.0))


def _longest_part(evidence: Evidence) -> Finding:
    part = max(evidence.parts, key=lambda part: evidence.parts[part])
    seconds = evidence.parts[part]
    text = (
        f"{_LONGEST[part]} are {evidence.of_step(seconds)}; no figure shows a part that a setting would save"
    )
    return Finding("longest part", seconds, text)
