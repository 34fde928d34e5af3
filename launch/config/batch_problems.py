"""Checks of batches, groups and the trajectories in them. Rows of the table in ``problems.py``."""

from typing import TYPE_CHECKING

from ...actors.columns.declared_columns import REWARD_COLUMN, outside_reward
from ...actors.credit.algorithms import ALGORITHMS
from ...actors.recipe.sources.query_pool import PoolOptions

if TYPE_CHECKING:
    from .run_config import RunConfig


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


def demonstration_problem(config: "RunConfig") -> str | None:
    """Refuses demonstrations whose rewards the algorithm does not use, and a second way to play a trajectory."""
    if config.rollout.demonstrations is None:
        return None
    if config.rollout.tree is not None:
        return (
            "rollout.demonstrations and rollout.tree: a trajectory follows its demonstration or branches; leave one of "
            "them out"
        )
    for name, agent in config.trained_agents.items():
        if agent.algorithm.used_rewards not in ("turn", "both"):
            return (
                "rollout.demonstrations rewards each turn by its agreement, and "
                f"agents.{name}.algorithm.name={agent.algorithm.name} does not use the rewards of turns: set "
                f"agents.{name}.algorithm.rewards to both or turn, or take at_grpo"
            )
        if outside_reward(agent.columns) is not None:
            return (
                f"rollout.demonstrations: agents.{name}.columns.{REWARD_COLUMN} has rewards from outside the run, and "
                "the agreement with a demonstration is the reward of its trajectories"
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
