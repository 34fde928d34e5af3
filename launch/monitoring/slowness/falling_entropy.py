"""Cause: a policy becomes sure of its answers, and tries few others."""

from collections.abc import Iterator
from statistics import fmean
from typing import Final

from ....actors.names import PolicyName
from ..formatting import change
from .evidence import Evidence
from .finding import Finding

_LEAST_STEPS: Final = 15
"""Shorter curves are mostly noise."""
_FIFTH: Final = 5
_REMAINING: Final = 0.5


def falling_entropy(evidence: Evidence) -> Iterator[Finding]:
    """By the first and the last fifth of the steps. It is a consequence of learning too: the rewards meanwhile are said
    with it."""
    for name in evidence.names("policy"):
        entropies = evidence.values("policy", name, "entropy")
        if len(entropies) < _LEAST_STEPS:
            continue
        before, now = _ends(entropies)
        if before > 0.0 and now < _REMAINING * before:
            yield Finding(
                "falling entropy",
                None,
                f"the entropy of {name} fell from {before:.3g} to {now:.3g} nats per token in {len(entropies)} steps"
                f"{_rewards(evidence, PolicyName(name))}; a bonus keeps it up",
                f"policies.{name}.algorithm.entropy_coefficient",
            )


def _ends(values: list[float]) -> tuple[float, float]:
    """Means of the first and the last fifth."""
    size = len(values) // _FIFTH
    return fmean(values[:size]), fmean(values[-size:])


def _rewards(evidence: Evidence, policy: PolicyName) -> str:
    """The rewards of the policy's agents meanwhile, as the rest of a sentence."""
    curves = {agent: evidence.values("agent", agent, "reward") for agent in evidence.policies.get(policy, [])}
    return "".join(
        f", while the reward of {agent} {change(*_ends(rewards), '.3g')}"
        for agent, rewards in curves.items()
        if len(rewards) >= _LEAST_STEPS
    )
