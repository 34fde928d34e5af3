"""Checks of explorations and of the policies that generate them. Rows of the table in ``problems.py``."""

from collections import Counter
from typing import TYPE_CHECKING

from ...actors.columns.declared_columns import REWARD_COLUMN, outside_reward
from ...actors.names import PolicyName

if TYPE_CHECKING:
    from .run_config import RunConfig


def explorations_problem(config: "RunConfig") -> str | None:
    """Refuses explorations that leave nothing to choose, or whose rewards are not there when they end."""
    if (rule := config.rollout.explorations) is None:
        return None
    size = config.training.trajectories_per_query + config.rollout.extra_trajectories
    if rule.count <= size:
        return (
            f"rollout.explorations.count={rule.count}: {size} of them are played again "
            "(training.trajectories_per_query), so that there is nothing to choose: write more"
        )
    for key in ("tree", "demonstrations"):
        if getattr(config.rollout, key) is not None:
            return f"rollout.explorations and rollout.{key}: both decide how a trajectory is played: write one of them"
    for name, agent in config.trained_agents.items():
        if outside_reward(agent.columns) is not None:
            return (
                f"rollout.explorations: agents.{name}.columns.{REWARD_COLUMN} has rewards from outside the run, which "
                "are given to samples alone: an exploration leaves none"
            )
    return None


def explorer_problem(config: "RunConfig") -> str | None:
    """Refuses explorers without explorations, and those that do not fit the policy that they explore."""
    counts = Counter(policy.explores for policy in config.policies.values())
    for name, policy in config.policies.items():
        if policy.explores is None:
            continue
        key = f"policies.{name}.explores={policy.explores!r}"
        if config.rollout.explorations is None:
            return f"{key}: the run has no explorations: write rollout.explorations.count, or leave policies.{name} out"
        if counts[policy.explores] > 1:
            return f"{key}: another policy explores it too: write more instances for one of them"
        if agents := [agent for agent, settings in config.agents.items() if settings.policy == name]:
            return f"agents.{agents[0]}.policy={name!r}: that policy explores, and has no agents of its own"
        if (problem := _fit_problem(config, name, policy.explores)) is not None:
            return f"{key}: {problem}"
    return None


def _fit_problem(config: "RunConfig", name: PolicyName, explored_name: PolicyName) -> str | None:
    policy, explored = config.policies[name], config.policies[explored_name]
    if not explored.train:
        return "that policy is not trained, and has no samples to choose"
    if policy.simulated != explored.simulated:
        return "one of the two is simulated, and the other is not"
    if policy.tokenizer != explored.tokenizer:
        return (
            f"its tokenizer {policy.tokenizer!r} is another than the policy's {explored.tokenizer!r}, so that the same "
            "seeds would draw other texts"
        )
    follows = config.followers.get(explored_name) == name
    if follows and policy.served_as_adapter != explored.served_as_adapter:
        return (
            f"its engine {policy.engine.name} takes other weights than the policy's {explored.engine.name}: one takes "
            "adapters, and the other whole models"
        )
    return None
