"""Role-conditioned baselines: a running mean of the rewards of each agent (RAE, SPIRAL, Liu et al., arXiv 2506.24119,
section 3.3).

    b_agent <- decay * b_agent + (1 - decay) * R        for every trajectory
    A = R - b_agent

Two sides of a zero-sum game on one policy have different expected rewards; one mean over both would push each side by
the other's advantage of position. In the paper the baseline moves with each trajectory in turn. Here a step's
advantages use the baseline as it was when the step began, and all of the step's trajectories move it when the policy
steps: so the result depends neither on the order of arrival nor on the micro-batches, and a sample can be trained at
once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...credit.credit_config import CreditConfig
from ...messages import Sample
from ...names import AgentName
from ...sample_id import SampleId


@dataclass(slots=True)
class RoleBaselines:
    """``means``: by agent; 0 before the first step. ``rewards``: of the present step, by agent and by trajectory, or by
    sample if turns have rewards of their own."""

    means: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, dict[str, float]] = field(default_factory=dict)

    def note(self, credit: Mapping[AgentName, CreditConfig], samples: Sequence[Sample]) -> None:
        """Adds the rewards of samples that are trained in this step."""
        for sample in samples:
            settings = credit[AgentName(sample.agent)]
            if settings.row.role_baseline:
                # By trajectory, not by sample: its turns all have its reward, which moves the mean once.
                name = sample.sample_id
                if settings.grouping == "trajectory":
                    name = f"{sample.group}_{SampleId.parse(name).trajectory}"
                self.rewards.setdefault(sample.agent, {})[name] = sample.reward

    def mean(self, credit: CreditConfig, agent: str) -> float:
        """The agent's when the step began; 0 if its algorithm has no running mean."""
        return self.means.get(agent, 0.0) if credit.row.role_baseline else 0.0

    def step(self, credit: Mapping[AgentName, CreditConfig]) -> None:
        """Moves the means by the rewards of the step: as one after another, each with their mean."""
        for agent, rewards in self.rewards.items():
            # The closed form of as many moves, each by the mean: exact for equal rewards, and the same in every order.
            kept = credit[AgentName(agent)].decay ** len(rewards)
            mean = math.fsum(rewards.values()) / len(rewards)
            self.means[agent] = kept * self.means.get(agent, 0.0) + (1.0 - kept) * mean
        self.rewards = {}
