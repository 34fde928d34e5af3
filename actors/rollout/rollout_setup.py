"""Everything that a rollout actor is made with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...core.ref import ActorRef
from ..declared_columns import Column
from ..group_advantage import AdvantageRule
from ..messages import ArchiveApi, ConsoleApi, Grouping, OrchestratorApi, RewardUse, RouterApi, StoreApi
from ..names import AgentName, PolicyName
from ..recipe import RecipeConfig
from .rollout_config import RolloutConfig, SamplingConfig


@dataclass(frozen=True, slots=True)
class RolloutAgent:
    """An agent of the workflow and the policy that generates its turns. ``columns``: declared, by name. ``advantage``:
    for the record of its samples; None: the trainer computes it later. ``trained``: its turns become samples; those of
    a frozen policy do not. ``rewards``, ``team_weight``: as in ``CreditConfig``; None: of the trajectory, and a turn's
    own is refused. ``against``: the agents whose past versions this one plays with."""

    policy: PolicyName
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    grouping: Grouping = "trajectory"
    columns: dict[str, Column] = field(default_factory=dict)
    advantage: AdvantageRule | None = None
    trained: bool = True
    rewards: RewardUse | None = None
    team_weight: float = 1.0
    against: tuple[AgentName, ...] = ()


def sides_of(
    agents: Mapping[AgentName, RolloutAgent],
) -> dict[PolicyName, tuple[list[AgentName], list[AgentName]]]:
    """By policy that is a pool of past versions: the agents against it, and its own."""
    sides: dict[PolicyName, tuple[list[AgentName], list[AgentName]]] = {}
    for agent, settings in agents.items():
        if settings.against:
            sides.setdefault(settings.policy, ([*settings.against], []))[1].append(agent)
    return sides


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """A policy of the run. ``tokenizer``: a hub name or folder."""

    tokenizer: str


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """``store_dir``: the store's folder on disk. ``logs``: the run's, which all hosts share. ``encrypted``: bulk
    between hosts is encrypted. ``archive``: keeps the trajectories for people; None: they are not recorded.
    ``console``: is notified if the recipe's ``teardown`` fails."""

    recipe: RecipeConfig
    agents: dict[AgentName, RolloutAgent]
    policies: dict[PolicyName, RolloutPolicy]
    store: ActorRef[StoreApi]
    router: ActorRef[RouterApi]
    orchestrator: ActorRef[OrchestratorApi]
    config: RolloutConfig
    store_dir: Path
    logs: Path
    encrypted: bool = True
    archive: ActorRef[ArchiveApi] | None = None
    console: ActorRef[ConsoleApi] | None = None
