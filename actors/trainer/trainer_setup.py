"""The trainer's constructor argument: its policies, and the places of the run's samples and weights."""

from dataclasses import dataclass, field
from pathlib import Path

from ...core.ref import ActorRef
from ..config_base import Config, Count, Natural
from ..credit.credit_config import CreditConfig
from ..expert_routes import ROUTES_COLUMN
from ..messages import (
    ArchiveApi,
    ConsoleApi,
    LoraConfig,
    ModelConfig,
    SlotApi,
    StoreApi,
    SupervisorApi,
    WeightsConfig,
)
from ..names import AgentName, PolicyName
from ..recipe.recipe import RecipeConfig
from .backends.backend_config import TorchTrainerConfig, TrainerBackendConfig
from .pool.pool_config import SharedPoolConfig
from .trainer_config import LossConfig, OptimizerConfig, SftConfig


class PolicySetup(Config):
    """A policy and its training. ``credit`` has an entry for each of its agents, in the order of the config.
    ``model``: None if the policy is simulated, or an endpoint's. ``lora``: of a policy that is an adapter over the
    model, None if all weights are trained; ``publishes_adapter``: instances have the model, and get the adapter alone.

    ``max_staleness``: the most versions that a sample may be older than the policy (0 unless the run is ``async``).
    ``updates``: optimizer steps of a step of the run. ``init_from``: the folder of a saved policy, whose weights this
    one starts from. ``probe_every``: every so many versions the weights are published with a probe, never if it is 0.
    ``compared_share``: of the queries whose trained tokens are compared with the engine's, for the record.
    """

    model: ModelConfig | None = None
    lora: LoraConfig | None = None
    publishes_adapter: bool = False
    trainer: TrainerBackendConfig = TorchTrainerConfig()
    credit: dict[AgentName, CreditConfig]
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    sft: SftConfig = SftConfig()
    max_staleness: Natural = 0
    updates: Count = 1
    init_from: Path | None = None
    probe_every: Natural = 0
    compared_share: float = 0.0

    @property
    def is_of_an_endpoint(self) -> bool:
        """True if the policy has no weights in this run."""
        return self.model is None and isinstance(self.trainer, TorchTrainerConfig)

    @property
    def read_columns(self) -> tuple[str, ...]:
        """The columns of its samples that training reads beside those that every run has."""
        replays = self.model is not None and self.model.router_replay
        return (*self.loss.loss_columns, *([ROUTES_COLUMN] if replays else []))

    @property
    def real_model(self) -> ModelConfig:
        """``model`` of a policy that is not simulated."""
        assert self.model is not None, "the policy is simulated"
        return self.model

    @property
    def torch_trainer(self) -> TorchTrainerConfig:
        """``trainer`` of a policy that is not simulated."""
        assert isinstance(self.trainer, TorchTrainerConfig), "the policy is simulated"
        return self.trainer


@dataclass(frozen=True, slots=True)
class SharedPoolSetup:
    """The slot workers of a run, and the actors that their facade reports to. ``spill_dir``: the folder on a disk for
    suspended states that exceed the memory."""

    config: SharedPoolConfig
    slots: list[ActorRef[SlotApi]]
    supervisor: ActorRef[SupervisorApi]
    console: ActorRef[ConsoleApi]
    spill_dir: Path


@dataclass(frozen=True, slots=True)
class TrainerSetup:
    """The argument of the trainer and of slot workers. ``frozen``: policies that the trainer publishes without training
    them. ``pool``: the shared pool that the trainer computes with; None
    if it computes in its own process, as a slot worker does.

    ``store_dir``: the store's folder on the disk.

    ``compute_timeout_s``: of each computation. ``total_steps``: of the run, for the learning rate's schedule.
    ``resume_from``: the folder of a joint checkpoint with one folder per policy; None: from the beginning.
    ``encrypted``: bulk between hosts is encrypted. ``archive``: keeps log-probabilities of trained tokens for
    people; None: they are not recorded.
    """

    policies: dict[PolicyName, PolicySetup]
    recipe: RecipeConfig
    total_steps: int
    store: ActorRef[StoreApi]
    store_dir: Path
    resume_from: Path | None = None
    pool: SharedPoolSetup | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    encrypted: bool = True
    compute_timeout_s: float = 3600.0
    frozen: dict[PolicyName, PolicySetup] = field(default_factory=dict)
    archive: ActorRef[ArchiveApi] | None = None

    @property
    def devices(self) -> list[str]:
        """The devices of the policies' models, by PyTorch's names; empty if they are simulated."""
        return [policy.model.device for policy in self.policies.values() if policy.model is not None]
