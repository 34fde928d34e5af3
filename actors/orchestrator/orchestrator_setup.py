"""Everything that an orchestrator is made with."""

from dataclasses import dataclass, field
from pathlib import Path

from ...core.ref import ActorRef
from ..messages import ConsoleApi, RolloutApi, RouterApi, StoreApi, SupervisorApi, TrainerApi
from ..names import AgentName, PolicyName
from ..recipe.recipe import RecipeConfig
from .checkpoint import RunState
from .closing_order import GroupOrder
from .evaluation import EvaluationRules
from .opponents.opponents import OpponentsSetup
from .plan import Plan
from .replay.replay_config import NoReplayConfig, ReplayConfig


@dataclass(frozen=True, slots=True)
class OrchestratorPolicy:
    """A policy of the run. ``agents``: those that use it. ``sft_batches``: supervised batches before the first step."""

    agents: tuple[AgentName, ...]
    sft_batches: int = 0


@dataclass(frozen=True, slots=True)
class OrchestratorSetup:
    """``plan``: of the whole run; one that is resumed begins after the step of ``resume_from``.

    ``supervisor``: restarts the workers. ``checkpoints_kept``: the newest that stay in ``checkpoints``.
    ``max_failed_share``: of a step's trajectories. ``data_timeout_s``: of a draw from the recipe's query
    source, or a call of its ``eval_queries``. ``serves``: nothing is trained or evaluated, the policies are served
    until the run is stopped. ``replay``: of finished trajectories. ``predicts_success``: the rule of its trees does.
    """

    plan: Plan
    policies: dict[PolicyName, OrchestratorPolicy]
    trajectories_per_query: int
    max_failed_share: float
    group_order: GroupOrder
    recipe: RecipeConfig
    trainer: ActorRef[TrainerApi]
    workers: list[ActorRef[RolloutApi]]
    store: ActorRef[StoreApi]
    supervisor: ActorRef[SupervisorApi]
    router: ActorRef[RouterApi]
    console: ActorRef[ConsoleApi]
    checkpoints: Path
    checkpoints_kept: int
    resume_from: RunState | None
    data_timeout_s: float = 600.0
    evaluation: EvaluationRules = field(default_factory=EvaluationRules)
    opponents: OpponentsSetup = field(default_factory=OpponentsSetup)
    serves: bool = False
    replay: ReplayConfig = field(default_factory=NoReplayConfig)
    predicts_success: bool = False

    @property
    def policy_of(self) -> dict[AgentName, PolicyName]:
        """The policy of each agent that is trained."""
        return {agent: policy for policy, settings in self.policies.items() for agent in settings.agents}
