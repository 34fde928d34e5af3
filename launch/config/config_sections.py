"""The sections of an agent and of a policy in a run's configuration."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from ...actors.columns.declared_columns import REWARD_COLUMN, Column, check_names
from ...actors.columns.store_client import ARRAY_COLUMNS, SCALAR_COLUMNS
from ...actors.config_base import Config, Count, Natural, Seconds, Unit
from ...actors.credit.credit_config import CreditConfig
from ...actors.errors import ConfigError
from ...actors.expert_routes import ROUTES, ROUTES_COLUMN
from ...actors.inference.inference_config import EmbeddedEngineConfig, EngineConfig, SimulatedEngineConfig
from ...actors.messages import LoraConfig, ModelConfig
from ...actors.names import PolicyName
from ...actors.orchestrator.orchestrator_config import PoolOfConfig
from ...actors.rollout.rollout_config import SamplingConfig
from ...actors.trainer.backends.backend_config import (
    SimulatedTrainerConfig,
    TorchTrainerConfig,
    TrainerBackendConfig,
)
from ...actors.trainer.trainer_config import LossConfig, OptimizerConfig, SftConfig
from ...core.protocol.session import DEFAULT_SETTINGS, Settings
from ...core.supervision.restart_policy import Intensity
from ...core.wire.zeromq import Tcp
from ..hosts.local_address import AUTO, own_address

RESTART_PERIOD_S: Final = 3600.0
"""The period of ``max_restarts``. Their number alone is a setting: one of the two says how often is too often."""

OF_TRAINING: Final = ("optimizer", "algorithm", "sft", "global_batch")
"""Keys of a policy that a frozen one does not have."""

_AT_STEP: Final = re.compile(r"(\w+)@(\d+)")


class AgentConfig(Config):
    """One LLM role: its policy by name, sampling and credit assignment."""

    policy: PolicyName
    """Name of the agent's policy; `{pool_of: NAME, ...}` or `NAME@STEP` for [past
    versions](opponents.md#past-versions-as-opponents) of it. Required, unless the agent has a `model`."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training turns."""
    algorithm: CreditConfig = CreditConfig()
    """Credit assignment."""
    columns: Annotated[dict[str, Column], Field(default_factory=dict)]
    """Columns of the agent's samples, by name, beyond those that training needs; the workflow fills them by
    ``Turn.write``."""

    @field_validator("columns")
    @classmethod
    def _column_names(cls, columns: dict[str, Column]) -> dict[str, Column]:
        if (reward := columns.get(REWARD_COLUMN)) is not None and (
            reward.type != "float" or not reward.awaited
        ):
            raise ValueError(
                "column 'reward': the workflow returns the rewards. For a program outside the run that gives them "
                "instead, write {type: float, required: true, written_by: external}"
            )
        try:
            further = {name: column for name, column in columns.items() if name != REWARD_COLUMN}
            check_names(further, (*SCALAR_COLUMNS, *ARRAY_COLUMNS, ROUTES_COLUMN))
        except ConfigError as error:  # pydantic adds the key to a ValueError alone
            raise ValueError(str(error)) from None
        for name, column in columns.items():
            if column.type == "tensor" and column.dtype is not None and column.dtype not in np.sctypeDict:
                raise ValueError(
                    f"column {name!r}: NumPy has no {column.dtype}, so that no workflow could write it"
                )
        return columns


class PolicyConfig(Config):
    """One set of weights, for one agent or several. A policy whose engine and trainer are simulated needs no model, and
    uses none. With ``lora`` the policy is an adapter over its model, which stays as it is; policies with the same
    ``model`` share it in memory, and their instances if the engine serves adapters.

    Samples of a step beyond ``global_batch`` are carried to the next, at most once; with fewer the policy waits for
    more. A frozen policy (``train: false``) has none of the keys ``OF_TRAINING``."""

    model: ModelConfig | None = None
    lora: LoraConfig | None = None
    instances: Annotated[Count, Unit("instances")] = 1
    """Engines that generate with the policy, each in a process of its own. [LoRA
    policies](training-pool.md#lora-policies) that share them have as many as the one with the most."""
    engine: EngineConfig = EmbeddedEngineConfig()
    trainer: TrainerBackendConfig = TorchTrainerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: LossConfig = LossConfig()
    sft: SftConfig = SftConfig()
    global_batch: Annotated[Count, Unit("samples")] | None = None
    """Samples of one optimizer step, for `async`. `null`: all samples of a step's queries, of all agents of the
    policy."""
    init_from: Path | None = None
    """Run whose weights the policy starts from: `RUN_DIR` (its newest checkpoint) or `RUN_DIR/STEP`. See [Weights of
    another run](operating.md#weights-of-another-run)."""
    train: bool = True
    """`false`: the policy is frozen, its weights stay as they are. See [Frozen agents](opponents.md#frozen-agents)."""
    pool_of: PoolOfConfig | None = None
    explores: PolicyName | None = None
    """Policy whose turns it generates in [explorations](algorithms.md#explorations), cheaper by its `engine`: with each
    of its versions, or with a `model` of its own that stays as it is. It is never trained."""

    @model_validator(mode="after")
    def _explorer_is_frozen(self) -> "PolicyConfig":
        if self.explores is not None and self.train:
            raise ValueError("train=true: an explorer is not trained: leave it out")
        if self.explores is not None and self.pool_of is not None:
            raise ValueError("explores and pool_of: write one of the two")
        return self

    @model_validator(mode="after")
    def _trains_what_it_generates_with(self) -> "PolicyConfig":
        if self.train and isinstance(self.engine, EmbeddedEngineConfig) and self.engine.quantizes:
            raise ValueError(
                f"engine.quantization={self.engine.quantization}: it would generate with other weights than those that "
                "are trained: write it in a policy that `explores` this one"
            )
        return self

    @model_validator(mode="after")
    def _replays_what_is_recorded(self) -> "PolicyConfig":
        if not self.replays_routes:
            return self
        if problem := self.engine.routes_problem(self.real_model.device):
            raise ValueError(f"model.router_replay=true: {problem}")
        if isinstance(self.trainer, TorchTrainerConfig) and self.trainer.compilation:
            raise ValueError(
                "trainer.compilation=true: layers whose experts are replayed are not compiled: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _pool_is_frozen(self) -> "PolicyConfig":
        if self.pool_of is not None and self.train:
            raise ValueError("train=true: past versions are not trained: leave it out")
        if self.pool_of is not None and self.init_from is not None:
            raise ValueError("init_from: a pool starts from its policy's weights: leave it out")
        return self

    @model_validator(mode="after")
    def _trains_or_has_no_training(self) -> "PolicyConfig":
        written: list[str] = [key for key in OF_TRAINING if key in self.model_fields_set]
        if not self.simulated and self.trainer != TorchTrainerConfig():
            written.append("trainer")
        if written and not self.train:
            remedy = (
                "train=false: leave one of the two out" if self.pool_of is None else "past versions are not"
            )
            raise ValueError(f"{written[0]} is for policies that are trained, and {remedy}")
        return self

    @model_serializer(mode="wrap")
    def _without_training(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A frozen policy is written without the keys that it may not have."""
        fields: dict[str, Any] = plain(self)
        if self.train:
            return fields
        return {key: value for key, value in fields.items() if key not in OF_TRAINING}

    @model_validator(mode="after")
    def _endpoint_is_never_trained(self) -> "PolicyConfig":
        if self.engine.endpoint:
            if self.train:
                raise ValueError(
                    f"engine.name={self.engine.name}: an endpoint is never trained: write train=false"
                )
            for key in ("model", "lora", "init_from", "pool_of"):
                if getattr(self, key) is not None:
                    raise ValueError(
                        f"{key}: with engine.name={self.engine.name} the endpoint has the weights: leave it out"
                    )
        return self

    @model_validator(mode="after")
    def _has_a_model(self) -> "PolicyConfig":
        inherits = self.pool_of is not None or self.explores is not None
        if self.model is None and not inherits and not self.simulated and not self.engine.endpoint:
            raise PydanticCustomError("model_missing", "is missing")
        return self

    @model_validator(mode="after")
    def _simulated_as_a_whole(self) -> "PolicyConfig":
        if isinstance(self.engine, SimulatedEngineConfig) != self.simulated:
            raise ValueError(
                f"engine.name={self.engine.name} and trainer.name={self.trainer.name}: engine and trainer are both "
                "simulated, or neither is"
            )
        return self

    @model_validator(mode="after")
    def _adapts_a_model(self) -> "PolicyConfig":
        if self.lora is None:
            return self
        if self.simulated:
            raise ValueError("lora: a simulated policy has no layers to adapt: leave it out")
        if problem := self.engine.lora_problem(self.lora.rank):
            raise ValueError(f"lora.rank={self.lora.rank}: {problem}")
        return self

    @property
    def served_as_adapter(self) -> bool:
        """True if instances have the model, and get the adapter alone; else they get weights with the adapter in
        them."""
        return self.lora is not None and self.engine.lora

    def shares_instances_with(self, other: "PolicyConfig") -> bool:
        """True if an instance serves both at the same time, as adapters over one base."""
        adapters = self.served_as_adapter and other.served_as_adapter
        return adapters and self.model == other.model and self.engine == other.engine

    @property
    def simulated(self) -> bool:
        """True if generating and training take time and compute nothing, for tests and measurements."""
        return isinstance(self.trainer, SimulatedTrainerConfig)

    @property
    def real_model(self) -> ModelConfig:
        """The model of a policy that is not simulated."""
        assert self.model is not None, "the policy is simulated"
        return self.model

    @property
    def used_model(self) -> ModelConfig | None:
        """The model that is trained and served; None if the policy is simulated or an endpoint's."""
        return None if self.simulated else self.model

    @property
    def sample_columns(self) -> dict[str, Column]:
        """The columns that its agents' samples have beside the declared ones."""
        return {ROUTES_COLUMN: ROUTES} if self.replays_routes else {}

    @property
    def replays_routes(self) -> bool:
        """True if its trainer takes the experts of its engines: see ``ModelConfig.router_replay``."""
        return self.train and self.used_model is not None and self.used_model.router_replay

    @property
    def served_model(self) -> ModelConfig | None:
        """``used_model`` as instances have it: routes of turns that are not trained are of no use."""
        model = self.used_model
        if model is None or self.train:
            return model
        return model.model_copy(update={"router_replay": False})

    @property
    def tokenizer(self) -> str:
        """Hub name or folder of the tokenizer; ``bytes`` if the policy is simulated or an endpoint's."""
        return "bytes" if self.used_model is None else self.real_model.tokenizer_source


class AlgorithmConfig(LossConfig, CreditConfig):
    """Credit assignment and loss, of one ``name``."""


class AgentWithPolicyConfig(PolicyConfig, AgentConfig):
    """An agent that names no policy: it has one of its own, of its name, and the settings of both. ``policy`` may be
    ``{pool_of: NAME, ...}`` or ``NAME@STEP``: then its own policy is past versions of another."""

    policy: PolicyName = PolicyName("")
    algorithm: AlgorithmConfig = AlgorithmConfig()

    @model_validator(mode="before")
    @classmethod
    def _past_versions(cls, section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        pool = pool_section(section)
        settings = {key: value for key, value in section.items() if key != "policy"}
        return settings if pool is None else {"train": False, **settings, "pool_of": pool}

    def divided(self, name: PolicyName) -> tuple[AgentConfig, PolicyConfig]:
        """The agent, and its policy, whose name is ``name``."""
        agent, policy = _part(self, AgentConfig), _part(self, PolicyConfig)
        if "algorithm" in self.model_fields_set:
            agent["algorithm"] = CreditConfig.model_validate(_part(self.algorithm, CreditConfig))
            policy["algorithm"] = LossConfig.model_validate(_part(self.algorithm, LossConfig))
        return AgentConfig.model_validate(agent | {"policy": name}), PolicyConfig.model_validate(policy)


def _part(section: Config, kind: type[Config]) -> dict[str, Any]:
    """The values that were given to ``section``, of the keys that ``kind`` has."""
    return {key: getattr(section, key) for key in kind.model_fields if key in section.model_fields_set}


def names_own_policy(section: Mapping[str, Any]) -> bool:
    """True for the section of an agent, as it is written, that names no policy of another agent or of ``policies``."""
    policy = section.get("policy")
    return policy is None or pool_section({"policy": policy}) is not None


def pool_section(section: Mapping[str, Any]) -> dict[str, Any] | None:
    """The section ``pool_of`` of an agent or a policy, as it is written; None without past versions."""
    pool, policy = section.get("pool_of"), section.get("policy")
    if isinstance(pool, dict):
        return pool
    if isinstance(policy, dict) and "pool_of" in policy:
        options = {key: value for key, value in policy.items() if key != "pool_of"}
        return {"policy": policy["pool_of"], **options}
    if isinstance(policy, str) and (at_step := _AT_STEP.fullmatch(policy)):
        return {"policy": at_step[1], "only": int(at_step[2])}
    return None


def agent_entry(section: Any) -> Any:
    """The section of an agent, as ``AgentWithPolicyConfig`` if it names no policy."""
    if isinstance(section, dict) and names_own_policy(section):
        return AgentWithPolicyConfig.model_validate(section)
    return section


class HostsConfig(Config):
    """The hosts of a run. GPUs that may not be used are left out, and a run that needs them is refused."""

    share_gpus: bool = False
    """`true`: GPUs on which other processes compute may be used, as far as their memory is free."""
    spread: bool = False
    """`true`: rollout workers but the first, and slots of a shared pool, are placed on all hosts. The ranks of a policy
    may then be on several, which needs `network.bulk=trusted`. Samples stay in the memory of the host that made them:
    if a host is lost and others of their groups are trained already, the run begins again from its newest checkpoint by
    itself."""


class NetworkConfig(Config):
    """The network between the hosts of a run."""

    listen: str | None = None
    """Address of this host, at which the run's processes listen over TCP, encrypted, each at a free port. `auto`: the
    address of this host's name, or that of its default route if the name has a loopback one. `null`: sockets in a
    private folder, which no other host reaches."""
    bulk: Literal["encrypted", "trusted"] = "encrypted"
    """Protection of weights, training states and samples on their way. `encrypted`: by TLS 1.3. `trusted`: plain, for
    networks where every machine is trusted; both ends still prove that they belong to the run, and digests are
    compared."""

    @property
    def encrypted(self) -> bool:
        """True if weights, states and samples are encrypted between hosts."""
        return self.bulk == "encrypted"

    def tcp(self) -> Tcp | None:
        """Returns the address to listen at; None for private sockets. Raises ConfigError if there is no address."""
        if self.listen is None:
            return None
        return Tcp(own_address() if self.listen == AUTO else self.listen)

    @field_validator("listen")
    @classmethod
    def _is_reached_by_others(cls, listen: str | None) -> str | None:
        if listen not in (None, AUTO):
            Tcp(listen)  # raises ValueError
        return listen


class ChecksConfig(Config):
    """The checks before the start of a run."""

    trajectory: bool = True
    """A trajectory is [played with random answers](operating.md#a-trajectory-before-the-start) before the start, and
    the first training queries are made in two processes and compared."""
    trajectory_timeout_s: Seconds = 60.0
    """Deadline of that, with the recipe's `setup`. The run starts after it, with a warning."""


class SupervisionConfig(Config):
    """The time after which an actor is lost, and the restarts of lost ones.

    Actors that can be restarted alone are. The loss of any other actor ends the run at once."""

    heartbeat_s: Seconds = DEFAULT_SETTINGS.heartbeat_s
    """Time between the pings to an actor that is needed."""
    missed_heartbeats: Annotated[Count, Field(ge=2), Unit("heartbeats")] = DEFAULT_SETTINGS.missed_heartbeats
    """Heartbeats without a sign of life within which a call fails."""
    silence_s: Seconds = 300.0
    """Time without an answer to the launcher, after which an actor that no other actor needs is lost too; in a run that
    stands still, a fifth of it."""
    stall_s: Seconds = 30.0
    """Time in which nothing has ended, after which a run stands still: the console names what it waits for."""
    stop_patience_s: Seconds = 10.0
    """Time in which nothing has ended, after which a run that was asked to stop ends at once; or three times the
    longest time between two work items, if that is more."""
    max_restarts: Annotated[Natural, Unit("restarts")] = 10
    """Most restarts of actors that are restarted alone, all together, within an hour. One more loss ends the run."""

    def settings(self) -> Settings:
        """Returns the time limits of the actors' connections."""
        return Settings(heartbeat_s=self.heartbeat_s, missed_heartbeats=self.missed_heartbeats)

    def intensity(self) -> Intensity:
        """Returns the most restarts within a period, for the supervisor."""
        return Intensity(self.max_restarts, RESTART_PERIOD_S)
