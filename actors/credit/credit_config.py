"""Settings of an agent's credit assignment."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from ..config_base import Config, NonNegative
from ..messages import Grouping, RewardUse
from .algorithms import ALGORITHMS, Algorithm, AlgorithmName
from .estimator import Estimator

_DEFAULT = ALGORITHMS["grpo"]
Decay = Annotated[NonNegative, Field(lt=1)]


def row_of(section: dict[Any, Any]) -> Algorithm:
    """The row of a section's ``name``; the default row for an unknown name, which is refused later."""
    name = section.get("name")
    return ALGORITHMS.get(name, _DEFAULT) if isinstance(name, str) else _DEFAULT


class CreditConfig(Config):
    """Credit assignment of one agent: its advantages from its rewards. Part of the agent's ``algorithm`` section.

    ``name`` chooses the row of ``ALGORITHMS``, and with it the estimator and the rewards that one is compared with.

    The reward of a sample, which is one turn: ``trajectory`` is its agent's for the trajectory, and the team's times
    ``team_weight``; ``turn`` is the turn's own (``Rewards.of``), 0 without one; ``both`` is their sum, the trajectory's
    if no turn has its own. By default ``both`` for at_grpo, dr_mas, ppo and reinforce_pp; for all others
    ``trajectory``, and rewards of turns are refused. With ``turn`` and ``both`` an algorithm whose grouping is
    ``trajectory`` compares an agent's turns (``agent_turns``), since they have different rewards."""

    name: AlgorithmName = "grpo"
    """Algorithm of the credit assignment; by default the policy's. See [Algorithms](algorithms.md)."""
    scale_rewards: bool = bool(_DEFAULT.scale_rewards)
    """Division of a group's centred rewards by their standard deviation. The default is the algorithm's, here that of
    `grpo`."""
    rewards: RewardUse | None = None
    """Reward of a sample: see [Rewards of turns](algorithms.md#rewards-of-turns). `null`: the algorithm's."""
    team_weight: NonNegative = 1.0
    """Weight of the team's reward in the trajectory's."""
    baseline_decay: Decay | None = None
    """Decay of the running mean of `rae`, for each trajectory. `null`: 0.95, as in the paper."""

    @model_validator(mode="before")
    @classmethod
    def _as_in_the_paper(cls, section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        return {"scale_rewards": bool(row_of(section).scale_rewards)} | section

    @model_validator(mode="after")
    def _fits_the_algorithm(self) -> "CreditConfig":
        if self.row.scale_rewards is None and self.scale_rewards:
            raise ValueError(f"{self.name} does not divide by a group's deviation: leave out scale_rewards")
        if not self.row.role_baseline and self.baseline_decay is not None:
            raise ValueError(f"{self.name} has no running mean: leave out baseline_decay")
        return self

    @property
    def row(self) -> Algorithm:
        """The algorithm that ``name`` chooses."""
        return ALGORITHMS[self.name]

    @property
    def estimator(self) -> Estimator:
        """The algorithm's estimator of advantages, with ``scale_rewards``."""
        return self.row.estimator(self.scale_rewards)

    @property
    def is_group_local(self) -> bool:
        """True if a sample is trained with the advantage of its group, but for a KL in the rewards; else the trainer
        adds its critic, a running mean, or the normalisation over the step."""
        return not (self.row.whiten or self.row.critic or self.row.role_baseline)

    @property
    def decay(self) -> float:
        """``baseline_decay``, or the paper's."""
        return 0.95 if self.baseline_decay is None else self.baseline_decay

    @property
    def used_rewards(self) -> RewardUse | None:
        """None: the trajectory's, and rewards of turns are refused."""
        return self.rewards or self.row.rewards

    @property
    def grouping(self) -> Grouping:
        """The rewards that a reward is compared with."""
        if self.row.grouping == "trajectory" and self.used_rewards in ("turn", "both"):
            return "agent_turns"
        return self.row.grouping
