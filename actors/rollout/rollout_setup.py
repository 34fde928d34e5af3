"""Everything that a rollout actor is made with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...core.ref import ActorRef
from ..columns.declared_columns import Column
from ..credit.credit_config import CreditConfig
from ..environments.rewards_config import RewardsConfig
from ..messages import (
    ArchiveApi,
    ConsoleApi,
    OrchestratorApi,
    RewardsApi,
    RouterApi,
    SessionsApi,
    StoreApi,
)
from ..names import AgentName, PolicyName
from ..recipe.recipe import RecipeConfig
from .rollout_config import RolloutConfig, SamplingConfig


@dataclass(frozen=True, slots=True)
class RolloutAgent:
    """An agent of the workflow and the policy that generates its turns. ``columns``: declared, by name. ``trained``:
    its turns become samples; those of a frozen policy do not. ``against``: the agents whose past versions this one
    plays with. ``explorer``: generates its turns in explorations; None: its policy does."""

    policy: PolicyName
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    credit: CreditConfig = field(default_factory=CreditConfig)
    columns: dict[str, Column] = field(default_factory=dict)
    trained: bool = True
    against: tuple[AgentName, ...] = ()
    explorer: PolicyName | None = None

    def generator(self, *, exploring: bool) -> PolicyName:
        """The policy whose instances generate a turn of the agent."""
        return self.explorer if exploring and self.explorer is not None else self.policy


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
    ``console``: is notified if the recipe's ``teardown`` fails. ``steps_wait``: a step waits for all of its groups
    (``strict``, ``sync``); else some, whose rewards come late, may be in another one, or in none. ``gateway``:
    at which programs outside the run open sessions. ``serves``: requests go to the agents, and no session is opened.
    ``replays``: the reports of groups have their trajectories, which may come again. ``reward_services``: for reward
    functions; without any, the worker computes them in its own processes."""

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
    steps_wait: bool = True
    gateway: ActorRef[SessionsApi] | None = None
    serves: bool = False
    replays: bool = False
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    reward_services: list[ActorRef[RewardsApi]] = field(default_factory=list)
