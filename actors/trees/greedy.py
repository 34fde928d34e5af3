"""The rule of AT-GRPO: the best candidate of each turn stays."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from .branch_rule import BranchRule, Candidate


class GreedyRule(BranchRule):
    """At each turn ``width`` candidates of one prompt are compared by their own rewards, and the best one stays
    (AT-GRPO, Zhao et al., arXiv 2510.11062, section 4.1: tree-structured sampling). The first of equal ones stays. If
    several agents are asked at once, candidates are rounds, compared by the sum of their agents' rewards: the paper has
    agents one after the other."""

    compares_rewards: ClassVar[bool] = True

    branch: Literal["greedy"] = "greedy"
    """Rule of the branches: see [Trees](environments.md#trees)."""

    def candidates(self, seen: Sequence[Candidate], room: int) -> int:
        return self.width

    def kept(self, candidates: Sequence[Candidate]) -> list[int]:
        rewards = [candidate.reward for candidate in candidates]
        return [rewards.index(max(rewards))]
