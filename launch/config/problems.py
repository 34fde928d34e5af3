"""Mistakes of a run's configuration that no section can see alone: the checks of sections against each other.

Each check is a function that returns its problem as one line, with the keys in it, or None; ``PROBLEMS`` has all of
them. A mistake within one section is refused by the section's own class.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...actors.columns.declared_columns import REWARD_COLUMN, common_types, outside_reward
from ...actors.config_base import AUTO
from ...actors.credit.algorithms import ALGORITHMS
from ...actors.credit.credit_config import CreditConfig
from ...actors.errors import ConfigError
from ...actors.inference.inference_config import VllmEngineConfig
from ...actors.names import PolicyName
from ...actors.orchestrator.orchestrator_config import PoolOfConfig
from ...actors.orchestrator.replay.replay_config import NoReplayConfig
from ...actors.recipe.sources.query_pool import PoolOptions
from ...actors.trainer.loss_columns import NUMBERS
from ...actors.trainer.pool.pool_config import SharedPoolConfig
from ...actors.trainer.trainer_config import credit_problem

if TYPE_CHECKING:
    from .config_sections import PolicyConfig
    from .run_config import RunConfig

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
RESERVED_POLICY_NAMES: Final = ("rewards", "rollout", "slot")
"""``rewards-0``, ``rollout-0`` and ``slot-0`` are the names of other actors than instances."""


def problems_of(config: "RunConfig") -> list[str]:
    """All of them, in the order of the table."""
    return [problem for check in PROBLEMS if (problem := check(config)) is not None]


def reference_problems(config: "RunConfig") -> list[str]:
    """Names of policies that do not exist, and policies that no agent names. The other checks follow the names."""
    names = ", ".join(config.policies)
    problems = []
    for name, agent in config.agents.items():
        if agent.policy not in config.policies:
            choice = f"; there are: {names}. Write one of them, or" if names else ":"
            problems.append(
                f"agents.{name}.policy={agent.policy!r}: there is no such policy{choice} add policies.{agent.policy} "
                "with a model"
            )
    for policy, section in config.policies.items():
        if not config.agents_of(policy):
            problems.append(
                f"policies.{policy}: no agent uses it: write `policy: {policy}` in an agent, or leave "
                f"policies.{policy} out"
            )
        problems += [
            f"policies.{policy}.pool_of.{key}={learner!r}: there is no such policy; there are: {names}"
            for key, learner in _policies_of_pool(section.pool_of)
            if learner not in config.policies
        ]
    return problems


# --------------------------------------------------------------------------- names


def name_problem(config: "RunConfig") -> str | None:
    """Refuses names of agents, policies and recipes that can't be names of metrics, actors or files."""
    for kind, names in (("agent", config.agents), ("policy", config.policies)):
        for name in names:
            if not _NAME.fullmatch(name):
                return f"{kind} name {name!r}: lower-case letters, digits and _, at most 32, a letter first"
    if not Path(config.recipe).name.isprintable():
        return f"recipe folder {Path(config.recipe).name!r} has characters that can't be printed: rename it"
    if "metrics" in config.agents:
        return "agent name 'metrics' is taken: Rewards(metrics=...) means something else"
    if reserved := [name for name in config.policies if name in RESERVED_POLICY_NAMES]:
        return (
            f"policy name {reserved[0]!r} is taken: its instances would have the names of rollout workers, reward "
            "services or slots; choose another"
        )
    return None


# --------------------------------------------------------------------------- the mode, and what it rules out


def staleness_problem(config: "RunConfig") -> str | None:
    """Refuses a bound of staleness in a mode without stale samples."""
    if config.mode != "async" and config.max_staleness is not None:
        return (
            f"max_staleness={config.max_staleness} is for mode=async; in mode={config.mode} every sample is trained by "
            "the version that generated it"
        )
    return None


def extra_queries_problem(config: "RunConfig") -> str | None:
    """Refuses queries beyond those of a step if the next step can't have them, or too many of them."""
    extra, queries = config.rollout.extra_queries, config.training.queries_per_step
    if not extra:
        return None
    key = f"rollout.extra_queries={extra}"
    if config.mode != "async":
        return (
            f"{key} is for mode=async: queries that a step leaves open would be trained by the next version, and "
            f"mode={config.mode} trains each sample by the version that generated it"
        )
    if extra >= queries:
        return (
            f"{key} must be less than training.queries_per_step={queries}: a step begins a query of its own"
        )
    if config.rollout.replacement_queries:
        return (
            f"{key} can't be used with rollout.replacement_queries={config.rollout.replacement_queries}: a step that "
            "has closed draws no query in place of one that it has passed on; leave one of them out"
        )
    carries = any(policy.global_batch is not None for policy in config.policies.values())
    if config.staleness <= carries:
        return (
            f"{key} with global_batch needs max_staleness=2: samples may be passed on twice, as part of a query and "
            f"as rows beyond the batch, and max_staleness is {config.staleness}"
        )
    return None


def replay_problem(config: "RunConfig") -> str | None:
    """Refuses a replay where samples may not be stale, are not weighed, or can't come again."""
    if isinstance(config.replay, NoReplayConfig):
        return None
    key = f"replay.name={config.replay.name}"
    if config.mode != "async":
        return f"{key} is for mode=async: mode={config.mode} trains each sample by the version that generated it, once"
    bound = config.replay.max_staleness
    if bound is not None and bound > config.staleness:
        return f"replay.max_staleness={bound} is more than the run's own max_staleness={config.staleness}"
    for name, policy in config.trained.items():
        if policy.algorithm.correction == "none":
            return (
                f"{key}: policies.{name}.algorithm.correction=none gives old samples no weight of their version: write "
                "decoupled, tis or icepop"
            )
    for agent, settings in config.trained_agents.items():
        if settings.algorithm.used_rewards in ("turn", "both"):
            return (
                f"{key}: agents.{agent}.algorithm.rewards={settings.algorithm.used_rewards} rewards turns, and a "
                "trajectory that comes again has its agents' rewards alone: write trajectory"
            )
        if settings.sampling.defaults.truncation is not None:
            return (
                f"{key}: agents.{agent}.sampling has top_k, top_p or min_p, and a trajectory that comes again has "
                "log-probabilities of whole distributions: leave them out"
            )
        if any(column.awaited for column in settings.columns.values()):
            return f"{key}: agents.{agent}.columns are written from outside, which happens once: leave one of both out"
    return None


def barrier_problem(config: "RunConfig") -> str | None:
    """Refuses a barrier of the step in a mode that has it anyway, or none."""
    if config.mode != "strict" and config.training.barrier == "step":
        return f"training.barrier=step is for mode=strict, and mode={config.mode}: leave it out"
    return None


def carried_samples_problem(config: "RunConfig") -> str | None:
    """Refuses a batch that carries samples over to the next step in a mode without stale samples."""
    for name, policy in config.policies.items():
        if config.mode != "async" and policy.global_batch is not None:
            return (
                f"policies.{name}.global_batch={policy.global_batch} is for mode=async: samples of a step beyond "
                f"it are carried to the next step and are stale there, which mode={config.mode} rules out. Without "
                "it the policy's batch is all samples of a step's queries"
            )
    return None


def sharing_problem(config: "RunConfig") -> str | None:
    """Refuses groups of other runs where samples may not be stale, or are weighed by a policy that is not known."""
    peers = config.sharing.peers
    if not peers:
        return None
    if config.mode != "async":
        return (
            f"sharing.peers is for mode=async: mode={config.mode} trains what its own version has generated, and the "
            "groups of other runs are of none"
        )
    if config.deterministic:
        return (
            "sharing.peers and deterministic=true: the time at which groups come would decide what is trained"
        )
    for name in peers:
        if not _NAME.fullmatch(name):
            return f"sharing.peers.{name}: lower-case letters, digits and _, at most 32, a letter first"
    for name, policy in config.trained.items():
        if policy.algorithm.old_policy == "behaviour" or policy.algorithm.penalises_rewards:
            which = (
                "old_policy=behaviour" if policy.algorithm.old_policy == "behaviour" else "kl_in_reward=true"
            )
            return (
                f"sharing.peers and policies.{name}.algorithm.{which}, which compares with log-probs of the policy "
                "that has generated an answer: other runs share text alone"
            )
    return None


def timing_problem(config: "RunConfig") -> str | None:
    """A setting with which time decides what is trained, in a deterministic run."""
    if not config.deterministic:
        return None
    if config.mode == "async":
        return "deterministic=true is for strict and sync: under async, time decides which version generates"
    if config.rollout.extra_trajectories:
        return (
            f"rollout.extra_trajectories={config.rollout.extra_trajectories} takes the trajectories that end first, "
            "which deterministic=true rules out"
        )
    if config.training.largest_micro_batch is not None:
        return (
            f"training.largest_micro_batch={config.training.largest_micro_batch}: the time at which samples come "
            "decides which are computed together, which deterministic=true rules out"
        )
    for name, agent in config.agents.items():
        if late := [column for column, declared in agent.columns.items() if declared.awaited]:
            return (
                f"agents.{name}.columns.{late[0]} is required and written_by external: the time at which it is "
                "written decides which samples are trained together, which deterministic=true rules out"
            )
    return None


def draws_problem(config: "RunConfig") -> str | None:
    """Refuses an engine in a deterministic run whose draws do not follow from the seed."""
    for name, policy in config.policies.items():
        if config.deterministic and not policy.engine.exact_draws:
            return (
                f"policies.{name}.engine.name={policy.engine.name} draws other tokens for the same seed, which "
                "deterministic=true rules out: take the engine embedded"
            )
    return None


# --------------------------------------------------------------------------- batches and groups


def micro_batch_problem(config: "RunConfig") -> str | None:
    """Refuses a micro-batch that is larger than a step."""
    trajectories = config.training.queries_per_step * config.training.trajectories_per_query
    if config.training.micro_batch > trajectories:
        return (
            f"training.micro_batch={config.training.micro_batch} is more than the {trajectories} trajectories of a "
            "step (queries_per_step x trajectories_per_query): nothing could overlap; write at most "
            f"{trajectories}"
        )
    largest = config.training.largest_micro_batch
    if largest is not None and largest < config.training.micro_batch:
        return (
            f"training.largest_micro_batch={largest} is less than training.micro_batch={config.training.micro_batch}: "
            "it is of several that wait together; leave it out to join none"
        )
    return None


def global_batch_problem(config: "RunConfig") -> str | None:
    """Refuses a batch that is smaller than a micro-batch, or that parts trajectories compared with each other."""
    for name, policy in config.policies.items():
        if policy.global_batch is not None and policy.global_batch < config.training.micro_batch:
            return (
                f"policies.{name}.global_batch={policy.global_batch} is less than "
                f"training.micro_batch={config.training.micro_batch}: a micro-batch is a part of it"
            )
        if policy.global_batch is not None and policy.algorithm.compares_within_batch:
            return (
                f"policies.{name}.global_batch={policy.global_batch} cuts through groups, whose KL "
                f"{policy.algorithm.name} compares: leave it out, or set kl_in_reward=false"
            )
    return None


def updates_problem(config: "RunConfig") -> str | None:
    """Refuses more updates than queries, and several of an algorithm that knows no old policy."""
    updates, queries = config.training.updates, config.training.queries_per_step
    if updates > queries:
        return (
            f"training.updates={updates} is more than training.queries_per_step={queries}: each update has whole "
            "groups, at least one"
        )
    for name, policy in config.trained.items():
        if updates > 1 and not policy.algorithm.has_ratio:
            return (
                f"training.updates={updates}: the policy has changed when the second update trains its samples, and "
                f"policies.{name}.algorithm.name={policy.algorithm.name} has no ratio to correct it by; give the "
                "policy another algorithm, or write updates=1"
            )
    return None


def query_pool_problem(config: "RunConfig") -> str | None:
    """Refuses a pool of queries that leaves its source nothing to choose."""
    if (
        isinstance(config.query_source, PoolOptions)
        and config.query_source.pool < config.training.queries_per_step
    ):
        return (
            f"query_source.pool={config.query_source.pool} is less than training.queries_per_step="
            f"{config.training.queries_per_step}: no query is twice in a step, so that nothing could be chosen"
        )
    return None


def group_size_problem(config: "RunConfig") -> str | None:
    """Refuses a least group size that no group reaches."""
    size, minimum = config.training.trajectories_per_query, config.rollout.min_trajectories
    if minimum > size:
        return (
            f"rollout.min_trajectories={minimum} is more than training.trajectories_per_query={size}: every "
            "group would be dropped"
        )
    return None


def comparison_problem(config: "RunConfig") -> str | None:
    """Refuses a comparison within groups of one trajectory, and a filter of equal rewards without a comparison."""
    for name, agent in config.trained_agents.items():
        compares = agent.algorithm.row.estimator.compares
        # In a tree the candidates of one prompt are compared, also if the trajectory is its query's only one.
        branches = config.rollout.tree is not None and config.rollout.tree.width > 1
        if compares and config.training.trajectories_per_query == 1 and not branches:
            alone = ", ".join(name for name, row in ALGORITHMS.items() if not row.estimator.compares)
            return (
                f"training.trajectories_per_query=1: agents.{name}.algorithm.name={agent.algorithm.name} compares "
                f"the trajectories of a query, so that it wants 2 or more; {alone} do with one"
            )
        comparing = [settings.label for settings in config.rollout.filters if settings.compares]
        if not compares and comparing:
            return (
                f"rollout.filters: {comparing[0]} is for algorithms that compare a group's rewards: "
                f"agents.{name}.algorithm.name={agent.algorithm.name} learns from equal rewards too"
            )
    return None


def tree_problem(config: "RunConfig") -> str | None:
    """Refuses branches whose turns the algorithm can't compare, or whose rewards come from elsewhere."""
    if (tree := config.rollout.tree) is None:
        return None
    for name, agent in config.trained_agents.items():
        key = f"agents.{name}.algorithm.name={agent.algorithm.name}"
        if not agent.algorithm.row.estimator.compares or not agent.algorithm.is_group_local:
            return (
                f"rollout.tree compares the candidates of a prompt, and {key} does not: take one that does, such as "
                "at_grpo or grpo"
            )
        if config.policies[agent.policy].algorithm.compares_within_batch:
            return (
                f"rollout.tree: {key} compares the KL of whole trajectories, and a trajectory that branches is not one "
                "sequence of turns: set kl_in_reward=false"
            )
        if tree.compares_rewards and agent.algorithm.used_rewards != "turn":
            return (
                f"rollout.tree.branch={tree.branch} ends candidates before their trajectory has rewards: set "
                f"agents.{name}.algorithm.rewards=turn, the reward that the turn has at once; the team's part belongs "
                "into it"
            )
        if outside_reward(agent.columns) is not None:
            return (
                f"rollout.tree: agents.{name}.columns.{REWARD_COLUMN} has rewards from outside the run, "
                "which come when the trajectory has ended"
            )
    return None


def gateway_problem(config: "RunConfig") -> str | None:
    """Refuses a gateway whose sessions would teach nothing, or decide what is trained."""
    if config.gateway.listen is None:
        return None
    key = f"gateway.listen={config.gateway.listen}"
    if config.deterministic:
        return f"{key}: the time at which sessions come decides what is trained, which deterministic=true rules out"
    for name, agent in config.trained_agents.items():
        if agent.algorithm.row.estimator.compares:
            alone = ", ".join(name for name, row in ALGORITHMS.items() if not row.estimator.compares)
            return (
                f"{key}: a session is one trajectory, and agents.{name}.algorithm.name={agent.algorithm.name} compares "
                f"those of a query, so that it would teach nothing; {alone} do with one"
            )
    return None


# --------------------------------------------------------------------------- agents and their policies


def training_problem(config: "RunConfig") -> str | None:
    """Refuses steps in which no policy is trained, and slots in a run without steps that no policy would use."""
    if config.trained:
        return None
    if config.training.steps:
        return (
            "all policies have train=false: at least one has to be trained; training.steps=0 only evaluates"
        )
    if isinstance(config.pool, SharedPoolConfig):
        return "pool.name=shared: all policies have train=false, and none needs a slot: leave the section pool out"
    return None


def frozen_agent_problem(config: "RunConfig") -> str | None:
    """Refuses columns and algorithms of agents without samples, whose policy is frozen."""
    for name, agent in config.agents.items():
        if config.policies[agent.policy].train:
            continue
        frozen = f"policy {agent.policy!r} has train=false"
        if agent.columns:
            return f"agents.{name}.columns.{next(iter(agent.columns))}: {frozen}, so that the agent has no samples"
        if agent.algorithm != CreditConfig():
            return f"agents.{name}.algorithm.name={agent.algorithm.name}: {frozen}, so that its rewards train nothing"
    return None


def past_versions_problem(config: "RunConfig") -> str | None:
    """Refuses a pool of past versions that does not fit the policy that it is made of."""
    problems = (_pool_problem(config, name, policy) for name, policy in config.policies.items())
    return next((problem for problem in problems if problem is not None), None)


def _pool_problem(config: "RunConfig", name: str, pool: "PolicyConfig") -> str | None:
    if pool.pool_of is None:
        return None
    key = f"policies.{name}.pool_of"
    if config.mode == "async":
        return (
            f"{key}: one member plays a whole step, and under mode=async steps overlap: write strict or sync"
        )
    every = config.evaluation.every
    if pool.pool_of.matches and (not every or pool.pool_of.every % every):
        return (
            f"{key}.matches={pool.pool_of.matches}: matches are played at evaluations, and evaluation.every={every} "
            f"has none whenever a version joins: write evaluation.every={pool.pool_of.every}"
        )
    problems = (_source_problem(config, pool, key, *source) for source in _policies_of_pool(pool.pool_of))
    return next((problem for problem in problems if problem is not None), None)


def _policies_of_pool(pool: PoolOfConfig | None) -> Iterator[tuple[str, PolicyName]]:
    """The policies that the section of a pool names, with their keys in it."""
    if pool is not None:
        yield "policy", pool.policy
        yield from (("exploiters", name) for name in pool.exploiters)
        yield "against", pool.trainee


def _source_problem(
    config: "RunConfig", pool: "PolicyConfig", key: str, part: str, name: PolicyName
) -> str | None:
    key, learner = f"{key}.{part}={name!r}", config.policies[name]
    if not learner.train:
        return f"{key}: that policy is frozen itself, and has no past versions"
    if part == "against":
        return None
    if (pool.model, pool.lora, pool.simulated) != (learner.model, learner.lora, learner.simulated):
        return f"{key}: a pool has the model and the adapter of its policy: leave model and lora out"
    if pool.served_as_adapter != learner.served_as_adapter:
        return (
            f"{key}: the pool's engine {pool.engine.name} takes other weights than the policy's "
            f"{learner.engine.name}: leave engine.name out"
        )
    return None


def credit_and_loss_problem(config: "RunConfig") -> str | None:
    """Refuses an agent's estimator that its policy's loss can't use."""
    for name, agent in config.trained_agents.items():
        loss = config.policies[agent.policy].algorithm
        if problem := credit_problem(agent.algorithm, loss):
            return (
                f"agents.{name}.algorithm.name={agent.algorithm.name} {problem}: write {loss.name} here too, or "
                f"give agent {name!r} a policy of its own"
            )
    return None


def columns_problem(config: "RunConfig") -> str | None:
    """Refuses a column that has different types at two agents."""
    try:
        common_types({name: agent.columns for name, agent in config.agents.items()})
    except ConfigError as error:
        return str(error)
    return None


def loss_columns_problem(config: "RunConfig") -> str | None:
    """Refuses a column of a user's loss that an agent's samples may lack, or that has no numbers."""
    for policy, settings in config.trained.items():
        for column in settings.algorithm.loss_columns:
            for agent in config.agents_of(policy):
                declared = config.agents[agent].columns.get(column)
                if declared is None or not declared.required or declared.type not in NUMBERS:
                    return (
                        f"policies.{policy}.algorithm.loss_columns: {column!r} must be a column of agents.{agent} too, "
                        f"{{type: {' | '.join(NUMBERS)}, required: true}}"
                    )
    return None


# --------------------------------------------------------------------------- trainers and the ways of weights


def simulation_problem(config: "RunConfig") -> str | None:
    """Refuses simulated trainers beside real ones."""
    if len({policy.simulated for policy in config.policies.values() if not policy.engine.endpoint}) > 1:
        return "some policies have trainer.name=simulated and others have not: one trainer trains all of them"
    return None


def gang_problem(config: "RunConfig") -> str | None:
    """Refuses more ranks than slots, and several ranks without slots."""
    for name, policy in config.policies.items():
        ranks = policy.trainer.ranks
        if ranks == AUTO:
            continue  # the plan stays within the slots
        if isinstance(config.pool, SharedPoolConfig):
            if config.pool.slots != AUTO and ranks > config.pool.slots:
                return (
                    f"policies.{name}.trainer.ranks={ranks} is more than pool.slots={config.pool.slots}: all ranks "
                    "of a policy compute at the same time, each on a slot of its own"
                )
        elif ranks > 1:
            return (
                f"policies.{name}.trainer.ranks={ranks} wants slot workers: write pool={{name: shared, slots: "
                f"{ranks}}}, or more slots"
            )
    return None


def network_problem(config: "RunConfig") -> str | None:
    """Refuses weights over TCP in a run that listens on no network."""
    if config.weights.path == "tcp" and config.network.listen is None:
        return (
            "weights.path=tcp: the run listens on no network: write network.listen=ADDRESS or "
            "network.listen=auto, or leave the path out"
        )
    return None


def weights_path_problem(config: "RunConfig") -> str | None:
    """Refuses CUDA IPC where weights do not lie in memory of a CUDA device."""
    if config.weights.path != "cuda_ipc":
        return None
    if isinstance(config.pool, SharedPoolConfig):
        return (
            "weights.path=cuda_ipc is for pool.name=static: a shared pool publishes from the host's memory, which "
            "outlives its slot workers: write shm"
        )
    for name, policy in config.policies.items():
        if not policy.train:
            return (
                f"weights.path=cuda_ipc, and policies.{name}.train=false: a frozen policy is published from the host's "
                "memory: write shm"
            )
        device = "a simulated one" if policy.used_model is None else policy.used_model.device
        if not device.startswith("cuda"):
            return (
                f"weights.path=cuda_ipc wants memory of a device, and policies.{name}.model.device is {device}: write "
                "shm"
            )
        if isinstance(policy.engine, VllmEngineConfig) and policy.engine.tensor_parallel > 1:
            return (
                f"weights.path=cuda_ipc: the {policy.engine.tensor_parallel} workers of "
                f"policies.{name}.engine.tensor_parallel take new weights out of the host's memory: write shm"
            )
    return None


PROBLEMS: Final[tuple[Callable[["RunConfig"], str | None], ...]] = (
    name_problem,
    staleness_problem,
    barrier_problem,
    carried_samples_problem,
    extra_queries_problem,
    replay_problem,
    sharing_problem,
    timing_problem,
    draws_problem,
    micro_batch_problem,
    global_batch_problem,
    updates_problem,
    group_size_problem,
    query_pool_problem,
    comparison_problem,
    tree_problem,
    gateway_problem,
    training_problem,
    frozen_agent_problem,
    past_versions_problem,
    credit_and_loss_problem,
    columns_problem,
    loss_columns_problem,
    simulation_problem,
    gang_problem,
    network_problem,
    weights_path_problem,
)
