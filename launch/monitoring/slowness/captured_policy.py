"""Cause: one agent decides what a shared policy learns."""

from collections.abc import Iterator
from typing import Final

from ....actors.names import AgentName, PolicyName
from .evidence import Evidence
from .finding import Finding

_MOST: Final = 0.9


def captured_policy(evidence: Evidence) -> Iterator[Finding]:
    """By its share of the gradient's norm if that is measured, else of the advantages over the trained tokens. Both are
    figures of shared policies alone."""
    for policy, agents in evidence.policies.items():
        for agent in agents:
            is_measured = bool(evidence.values("agent", agent, "gradient_share"))
            measure = "the gradient's norm" if is_measured else "the advantages"
            figure = "gradient_share" if is_measured else "advantage_share"
            share = _share(evidence, policy, agent, figure) if len(agents) > 1 else 0.0
            if share > _MOST:
                tokens = _share(evidence, policy, agent, "token_share")
                yield Finding(
                    "captured policy",
                    None,
                    f"{agent} has {share:.0%} of {measure} that {policy} learns from, and {tokens:.0%} of its "
                    f"tokens; {len(agents)} agents share the policy",
                    f"agents.{agent}.policy",
                )


def _share(evidence: Evidence, policy: PolicyName, agent: AgentName, figure: str) -> float:
    """An agent's share over all steps: each counts by the tokens that it has trained."""
    whole = part = 0.0
    for step in evidence.steps:
        share = step.by_agent.get(agent, {}).get(figure)
        numbers = step.by_policy.get(policy, {})
        if share is not None:
            tokens = numbers.get("samples", 1) * numbers.get("mean_tokens", 1.0)
            whole, part = whole + tokens, part + share * tokens
    return part / whole if whole else 0.0
