"""The run's configuration: its schema, the checks across sections, and the roles' parts of it."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, JsonValue, model_validator

from ...actors.columns.declared_columns import Column, common_types
from ...actors.config_base import Config, Count, Natural
from ...actors.credit.algorithms import ALGORITHMS
from ...actors.inference.router.rebalancer import BalanceConfig
from ...actors.inference.router.router_config import RouterConfig
from ...actors.messages import MOST_VERSION_CHANGES, WeightsConfig
from ...actors.names import AgentName, PolicyName
from ...actors.orchestrator.orchestrator_config import CheckpointConfig, EvaluationConfig, TrainingConfig
from ...actors.orchestrator.plan import Mode
from ...actors.recipe.recipe import RecipeConfig
from ...actors.rollout.rollout_config import RolloutConfig
from ...actors.store.store_config import StoreConfig
from ...actors.trainer.pool.pool_config import PoolConfig, SharedPoolConfig, StaticPoolConfig
from ...actors.trainer.trainer_config import credit_problem
from ..monitoring.sinks.sink_config import SinkConfigs
from ..run_folder.samples.archive import SamplesConfig
from .config_sections import (
    AgentConfig,
    HostsConfig,
    NetworkConfig,
    PolicyConfig,
    SupervisionConfig,
    config_errors,
)
from .frozen_policies import frozen_problems
from .weights_paths import weights_path_problem

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
# ``rollout-0`` and ``slot-0`` are the names of other actors than instances.
_TAKEN = ("rollout", "slot")


class RunConfig(Config):
    """Everything that a run depends on. ``mode``: ``strict`` (rollout and training of a step overlap, strictly
    on-policy), ``sync`` (a barrier between them) or ``async`` (rollout runs up to ``max_staleness`` steps ahead, by
    default 1 and at most 16, and samples are trained by a policy at most that many versions newer than the one that
    generated their first token: AReaL, arXiv 2505.24298, section 5.1). ``deterministic``: two runs with the same seed,
    or one and its resumed halves, have bit-equal losses.

    Every agent names its policy here, also if it is written as an agent with a model (``config_policies.py``).

    It is one class because it is one document: most of it are checks of sections against each other.
    """

    recipe: str
    seed: Annotated[Natural, Field(lt=2**63)] = 0
    mode: Mode = "strict"
    max_staleness: Annotated[Count, Field(le=MOST_VERSION_CHANGES)] | None = None
    deterministic: bool = False
    data: Annotated[dict[str, JsonValue], Field(default_factory=dict)]
    policies: dict[PolicyName, PolicyConfig]
    agents: Annotated[dict[AgentName, AgentConfig], Field(min_length=1)]
    training: TrainingConfig
    pool: PoolConfig = StaticPoolConfig()
    weights: WeightsConfig = WeightsConfig()
    rollout: RolloutConfig = RolloutConfig()
    router: RouterConfig = RouterConfig()
    balance: BalanceConfig = BalanceConfig()
    store: StoreConfig = StoreConfig()
    samples: SamplesConfig = SamplesConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    hosts: HostsConfig = HostsConfig()
    network: NetworkConfig = NetworkConfig()
    sinks: SinkConfigs = ()

    # ------------------------------------------------------------------ checks

    @model_validator(mode="after")
    def _names_are_plain(self) -> "RunConfig":
        for kind, names in (("agent", self.agents), ("policy", self.policies)):
            for name in names:
                if not _NAME.fullmatch(name):
                    raise ValueError(
                        f"{kind} name {name!r}: lower-case letters, digits and _, at most 32, a letter first"
                    )
        if not Path(self.recipe).name.isprintable():
            raise ValueError(
                f"recipe folder {Path(self.recipe).name!r} has characters that can't be printed: rename it"
            )
        if "metrics" in self.agents:
            raise ValueError("agent name 'metrics' is taken: Rewards(metrics=...) means something else")
        if taken := [name for name in self.policies if name in _TAKEN]:
            raise ValueError(
                f"policy name {taken[0]!r} is taken: its instances would have the names of rollout workers or slots; "
                "choose another"
            )
        return self

    @model_validator(mode="after")
    def _micro_batch_fits(self) -> "RunConfig":
        trajectories = self.training.queries_per_step * self.training.trajectories_per_query
        if self.training.micro_batch > trajectories:
            raise ValueError(
                f"training.micro_batch={self.training.micro_batch} is more than the {trajectories} trajectories of a "
                "step (queries_per_step x trajectories_per_query): nothing could overlap"
            )
        return self

    @model_validator(mode="after")
    def _weights_have_a_network(self) -> "RunConfig":
        if self.weights.path == "tcp" and self.network.listen is None:
            raise ValueError(
                "weights.path=tcp: the run listens on no network: write network.listen=ADDRESS or "
                "network.listen=auto, or leave the path out"
            )
        return self

    @model_validator(mode="after")
    def _only_async_is_stale(self) -> "RunConfig":
        if self.mode == "async":
            return self
        if self.max_staleness is not None:
            raise ValueError(
                f"max_staleness={self.max_staleness} is for mode=async; in mode={self.mode} every sample is trained by "
                "the version that generated it"
            )
        for name, policy in self.policies.items():
            if policy.global_batch is not None:
                raise ValueError(
                    f"policies.{name}.global_batch={policy.global_batch} is for mode=async: samples of a step beyond "
                    f"it are carried to the next step and are stale there, which mode={self.mode} rules out. Without "
                    "it the policy's batch is all samples of a step's queries"
                )
        return self

    @model_validator(mode="after")
    def _time_decides_nothing(self) -> "RunConfig":
        if not self.deterministic:
            return self
        if self.mode == "async":
            raise ValueError(
                "deterministic=true is for strict and sync: under async, time decides which version generates"
            )
        if self.rollout.extra_trajectories:
            raise ValueError(
                f"rollout.extra_trajectories={self.rollout.extra_trajectories} takes the trajectories that end first, "
                "which deterministic=true rules out"
            )
        for name, agent in self.agents.items():
            if late := [column for column, declared in agent.columns.items() if declared.awaited]:
                raise ValueError(
                    f"agents.{name}.columns.{late[0]} is required and written_by external: the time at which it is "
                    "written decides which samples are trained together, which deterministic=true rules out"
                )
        return self

    @model_validator(mode="after")
    def _draws_can_be_repeated(self) -> "RunConfig":
        for name, policy in self.policies.items():
            if self.deterministic and not policy.engine.exact_draws:
                raise ValueError(
                    f"policies.{name}.engine.name={policy.engine.name} draws other tokens for the same seed, which "
                    "deterministic=true rules out: take the engine embedded"
                )
        return self

    @model_validator(mode="after")
    def _global_batch_fits(self) -> "RunConfig":
        for name, policy in self.policies.items():
            if policy.global_batch is not None and policy.global_batch < self.training.micro_batch:
                raise ValueError(
                    f"policies.{name}.global_batch={policy.global_batch} is less than "
                    f"training.micro_batch={self.training.micro_batch}: a micro-batch is a part of it"
                )
            if policy.global_batch is not None and policy.algorithm.compares_within_batch:
                raise ValueError(
                    f"policies.{name}.global_batch={policy.global_batch} cuts through groups, whose KL "
                    f"{policy.algorithm.name} compares: leave it out, or set kl_in_reward=false"
                )
        return self

    @model_validator(mode="after")
    def _group_fits(self) -> "RunConfig":
        wanted, minimum = self.training.trajectories_per_query, self.rollout.min_trajectories
        if minimum > wanted:
            raise ValueError(
                f"rollout.min_trajectories={minimum} is more than training.trajectories_per_query={wanted}: every "
                "group would be dropped"
            )
        return self

    @model_validator(mode="after")
    def _something_is_trained(self) -> "RunConfig":
        if not self.trained:
            raise ValueError("all policies have train=false: at least one has to be trained")
        for problem in frozen_problems(self.policies, self.agents, self.mode):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _groups_compare(self) -> "RunConfig":
        for name, agent in self.trained_agents.items():
            compares = agent.algorithm.row.estimator.compares
            if compares and self.training.trajectories_per_query == 1:
                alone = ", ".join(name for name, row in ALGORITHMS.items() if not row.estimator.compares)
                raise ValueError(
                    f"training.trajectories_per_query=1: agents.{name}.algorithm.name={agent.algorithm.name} compares "
                    f"the trajectories of a query, so that it wants 2 or more; {alone} do with one"
                )
            if not compares and self.rollout.drop_zero_advantage:
                raise ValueError(
                    "rollout.drop_zero_advantage is for algorithms that compare a group's rewards: "
                    f"agents.{name}.algorithm.name={agent.algorithm.name} learns from equal rewards too"
                )
        return self

    @model_validator(mode="after")
    def _credit_fits_the_loss(self) -> "RunConfig":
        for name, agent in self.trained_agents.items():
            loss = self.policies[agent.policy].algorithm
            if problem := credit_problem(agent.algorithm, loss):
                raise ValueError(
                    f"agents.{name}.algorithm.name={agent.algorithm.name} {problem}: write {loss.name} here too, or "
                    f"give agent {name!r} a policy of its own"
                )
        return self

    @model_validator(mode="after")
    def _columns_agree(self) -> "RunConfig":
        with config_errors():
            common_types({name: agent.columns for name, agent in self.agents.items()})
        return self

    @model_validator(mode="after")
    def _all_simulated_or_none(self) -> "RunConfig":
        if len({policy.simulated for policy in self.policies.values() if not policy.engine.endpoint}) > 1:
            raise ValueError(
                "some policies have trainer.name=simulated and others have not: one trainer trains all of them"
            )
        return self

    @model_validator(mode="after")
    def _gangs_fit_the_pool(self) -> "RunConfig":
        for name, policy in self.policies.items():
            ranks = policy.trainer.ranks
            if isinstance(self.pool, SharedPoolConfig):
                if ranks > self.pool.slots:
                    raise ValueError(
                        f"policies.{name}.trainer.ranks={ranks} is more than pool.slots={self.pool.slots}: all ranks "
                        "of a policy compute at the same time, each on a slot of its own"
                    )
            elif ranks > 1:
                raise ValueError(
                    f"policies.{name}.trainer.ranks={ranks} wants slot workers: write pool={{name: shared, slots: "
                    f"{ranks}}}, or more slots"
                )
        return self

    @model_validator(mode="after")
    def _weights_path_exists(self) -> "RunConfig":
        if (problem := weights_path_problem(self.weights, self.pool, self.policies)) is not None:
            raise ValueError(problem)
        return self

    # ------------------------------------------------------------------ agents and policies

    def policy_of(self, agent: AgentName) -> PolicyName:
        return self.agents[agent].policy

    def agents_of(self, policy: PolicyName) -> tuple[AgentName, ...]:
        """The agents that use ``policy``, in the order of the config; at least one."""
        return tuple(name for name, agent in self.agents.items() if agent.policy == policy)

    def against(self, agent: AgentName) -> tuple[AgentName, ...]:
        """The agents of the policy whose past versions ``agent`` plays with; empty if it plays with none."""
        pool = self.policies[self.agents[agent].policy].pool_of
        return () if pool is None else self.agents_of(pool.policy)

    @property
    def trained(self) -> dict[PolicyName, PolicyConfig]:
        """The policies that are not frozen."""
        return {name: policy for name, policy in self.policies.items() if policy.train}

    @property
    def trained_agents(self) -> dict[AgentName, AgentConfig]:
        """The agents whose policies are trained: only their turns become samples."""
        return {name: agent for name, agent in self.agents.items() if self.policies[agent.policy].train}

    def columns(self) -> dict[AgentName, dict[str, Column]]:
        """The columns that the run declares, by agent that is trained."""
        return {name: agent.columns for name, agent in self.trained_agents.items()}

    # ------------------------------------------------------------------ for the roles

    @property
    def staleness(self) -> int:
        """The most versions that a sample may be older than the policy that it trains."""
        return (self.max_staleness or 1) if self.mode == "async" else 0

    @property
    def simulated(self) -> bool:
        return all(policy.simulated for policy in self.trained.values())

    def served_together(self) -> dict[tuple[PolicyName, ...], int]:
        """The policies that have the same instances, and the number of these. Policies that are served as adapters over
        the same model by the same engine have as many as the one with the most; others have their own."""
        together: list[list[PolicyName]] = []
        for name, policy in self.policies.items():
            for names in together:
                if policy.shares_instances_with(self.policies[names[0]]):
                    names.append(name)
                    break
            else:
                together.append([name])
        return {tuple(names): max(self.policies[name].instances for name in names) for names in together}

    def recipe_config(self) -> RecipeConfig:
        return RecipeConfig(folder=self.recipe, data=self.data, seed=self.seed)
