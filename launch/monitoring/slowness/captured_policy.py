"""Cause: one agent decides what a shared policy learns."""

import math
from collections.abc import Iterator
from typing import Final

from .evidence import Evidence
from .finding import Finding

_MOST: Final = 0.9


def captured_policy(evidence: Evidence) -> Iterator[Finding]:
    """By its share of the advantages over the trained tokens, which is measured of shared policies alone."""
    for policy, agents in evidence.policies.items():
        for agent in agents:
            shares = evidence.values("agent", agent, "advantage_share")
            if len(agents) > 1 and shares and (share := math.fsum(shares) / len(shares)) > _MOST:
                tokens = evidence.per_step("agent", agent, "token_share")
                yield Finding(
                    "captured policy",
                    None,
                    f"{agent} has {share:.0%} of the advantages that {policy} learns from, and {tokens:.0%} of its "
                    f"tokens; {len(agents)} agents share the policy",
                    f"agents.{agent}.policy",
                )
