"""The run's configuration: its schema, and what follows from it about agents and policies."""

from typing import Annotated

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from ...actors.columns.declared_columns import Column
from ...actors.config_base import Config, Count, Natural, Unit
from ...actors.environments.rewards_config import RewardsConfig
from ...actors.inference.router.rebalancer import BalanceConfig
from ...actors.inference.router.router_config import RouterConfig
from ...actors.messages import MOST_VERSION_CHANGES, WeightsConfig
from ...actors.names import AgentName, PolicyName
from ...actors.orchestrator.orchestrator_config import CheckpointConfig, EvaluationConfig, TrainingConfig
from ...actors.orchestrator.plan import Mode
from ...actors.orchestrator.replay.replay_config import NoReplayConfig, ReplayConfig
from ...actors.recipe.recipe import RecipeConfig
from ...actors.recipe.sources.plain_source import PlainSourceConfig
from ...actors.recipe.sources.source_config import SourceConfig
from ...actors.rollout.rollout_config import RolloutConfig
from ...actors.store.store_config import StoreConfig
from ...actors.trainer.pool.pool_config import PoolConfig, StaticPoolConfig
from ..gateway.gateway_config import GatewayConfig
from ..hosts.env import shows_whole_tracebacks
from ..monitoring.page.page_config import PageConfig
from ..monitoring.sinks.sink_config import SinkConfigs
from ..run_folder.samples.archive import SamplesConfig
from ..run_folder.spans.trace_config import TraceConfig
from ..sharing.sharing_config import SharingConfig
from .agent_problems import reference_problems
from .config_sections import (
    AgentConfig,
    AgentWithPolicyConfig,
    ChecksConfig,
    HostsConfig,
    NetworkConfig,
    PolicyConfig,
    SupervisionConfig,
    agent_entry,
)
from .problems import problems_of


class RunConfig(Config):
    """Everything that a run depends on. An agent that names no policy is divided into the agent and its own policy, so
    that every agent has the name of its policy. Defaults of all agents are not here (``written_config.py``).

    Sections are checked against each other by ``problems.py``, all mistakes at once."""

    recipe: str
    """Folder of the recipe. Set by the command line, not by `config.yaml`."""
    seed: Annotated[Natural, Field(lt=2**63)] = 0
    """Seed of queries, sampling and new weights."""
    mode: Mode = "strict"
    """Overlap of rollout and training. `strict`: they overlap within a step, strictly on-policy; `sync`: a barrier
    stands between them; `async`: rollout runs up to `max_staleness` steps ahead (AReaL, arXiv 2505.24298, section 5.1).
    See [Modes](modes.md)."""
    max_staleness: Annotated[Count, Field(le=MOST_VERSION_CHANGES), Unit("versions")] | None = None
    """Most versions that a sample may be older than the policy that it trains, for `async`. `null`: 1."""
    deterministic: bool = False
    """`true`: two runs with the same seed, or one and its resumed halves, have bit-equal losses. See [Deterministic
    runs](modes.md#deterministic-runs)."""
    data: Annotated[dict[str, JsonValue], Field(default_factory=dict)]
    """Keyword arguments of the recipe's functions: see [Workflows](workflows.md)."""
    policies: Annotated[dict[PolicyName, PolicyConfig], Field(default_factory=dict)]
    agents: Annotated[
        dict[AgentName, Annotated[AgentConfig, BeforeValidator(agent_entry)]], Field(min_length=1)
    ]
    training: TrainingConfig
    query_source: SourceConfig = PlainSourceConfig()
    replay: ReplayConfig = NoReplayConfig()
    sharing: Annotated[SharingConfig, Field(default_factory=SharingConfig)]
    pool: PoolConfig = StaticPoolConfig()
    weights: WeightsConfig = WeightsConfig()
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardsConfig = RewardsConfig()
    router: RouterConfig = RouterConfig()
    balance: BalanceConfig = BalanceConfig()
    store: StoreConfig = StoreConfig()
    samples: SamplesConfig = SamplesConfig()
    trace: TraceConfig = TraceConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    checks: ChecksConfig = ChecksConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    hosts: HostsConfig = HostsConfig()
    network: NetworkConfig = NetworkConfig()
    gateway: GatewayConfig = GatewayConfig()
    page: PageConfig = PageConfig()
    sinks: SinkConfigs = ()
    """Programs that get the metrics too: names, functions `file.py:function`, or sections with a `name` and the keys
    [below](#sinkstensorboard)."""

    @model_validator(mode="after")
    def _every_agent_has_a_policy(self) -> "RunConfig":
        for name, agent in self.agents.items():
            if not isinstance(agent, AgentWithPolicyConfig):
                continue
            policy = PolicyName(name)
            if policy in self.policies:
                raise ValueError(
                    f"policies.{policy}: agent {name!r} names no policy, so that it has one of its own of the same "
                    f"name: write `policy: {policy}` in agents.{name} to use policies.{policy}, or give "
                    f"policies.{policy} another name"
                )
            self.agents[name], self.policies[policy] = agent.divided(policy)
        return self

    @model_validator(mode="after")
    def _sections_fit(self) -> "RunConfig":
        if problems := reference_problems(self) or problems_of(self):
            raise ValueError("\n".join(problems))
        return self

    def policy_of(self, agent: AgentName) -> PolicyName:
        """Returns the policy of an agent. Raises KeyError for an unknown one."""
        return self.agents[agent].policy

    def agents_of(self, policy: PolicyName) -> tuple[AgentName, ...]:
        """The agents that use ``policy``, in the order of the config; at least one. Those of an explorer are those of
        the policy that it explores."""
        policy = self.policies[policy].explores or policy
        return tuple(name for name, agent in self.agents.items() if agent.policy == policy)

    def against(self, agent: AgentName) -> tuple[AgentName, ...]:
        """The agents of the policy in training that plays against ``agent``; empty for one without past versions."""
        pool = self.policies[self.agents[agent].policy].pool_of
        return () if pool is None else self.agents_of(pool.trainee)

    @property
    def trained(self) -> dict[PolicyName, PolicyConfig]:
        """The policies that are not frozen."""
        return {name: policy for name, policy in self.policies.items() if policy.train}

    @property
    def frozen(self) -> dict[PolicyName, PolicyConfig]:
        """The policies that are not trained, and have weights of their own."""
        followers = self.followers.values()
        return {
            name: policy
            for name, policy in self.policies.items()
            if not policy.train and name not in followers
        }

    @property
    def trained_agents(self) -> dict[AgentName, AgentConfig]:
        """The agents whose policies are trained: only their turns become samples."""
        return {name: agent for name, agent in self.agents.items() if self.policies[agent.policy].train}

    def columns(self) -> dict[AgentName, dict[str, Column]]:
        """The columns of samples that not every run has, by agent that is trained: declared ones, and routes."""
        return {
            name: agent.columns | self.policies[agent.policy].sample_columns
            for name, agent in self.trained_agents.items()
        }

    @property
    def explorers(self) -> dict[PolicyName, PolicyName]:
        """The policies that generate explorations, by the policy that each explores."""
        return {
            policy.explores: name for name, policy in self.policies.items() if policy.explores is not None
        }

    @property
    def followers(self) -> dict[PolicyName, PolicyName]:
        """The explorers that have no weights of their own, by the policy whose versions they serve."""
        return {
            explored: name
            for explored, name in self.explorers.items()
            if self.policies[name].init_from is None
            and (self.policies[name].model, self.policies[name].lora)
            == (self.policies[explored].model, self.policies[explored].lora)
        }

    @property
    def staleness(self) -> int:
        """The most versions that a sample may be older than the policy that it trains."""
        return (self.max_staleness or 1) if self.mode == "async" else 0

    @property
    def simulated(self) -> bool:
        """True if all trained policies have a simulated trainer."""
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
        """Returns the part of the config with which an actor loads the recipe."""
        return RecipeConfig(
            folder=self.recipe,
            data=self.data,
            seed=self.seed,
            query_source=self.query_source,
            whole_tracebacks=shows_whole_tracebacks(),
        )
