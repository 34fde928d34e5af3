"""Checks of agents against their policies. Rows of the table in ``problems.py``."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...actors.columns.declared_columns import common_types
from ...actors.credit.credit_config import CreditConfig
from ...actors.errors import ConfigError
from ...actors.names import PolicyName
from ...actors.orchestrator.orchestrator_config import PoolOfConfig
from ...actors.trainer.loss_columns import NUMBERS
from ...actors.trainer.pool.pool_config import SharedPoolConfig
from ...actors.trainer.trainer_config import credit_problem

if TYPE_CHECKING:
    from .config_sections import PolicyConfig
    from .run_config import RunConfig


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
        if section.explores is None and not config.agents_of(policy):
            problems.append(
                f"policies.{policy}: no agent uses it: write `policy: {policy}` in an agent, or leave "
                f"policies.{policy} out"
            )
        if section.explores is not None and section.explores not in config.policies:
            problems.append(
                f"policies.{policy}.explores={section.explores!r}: there is no such policy; there are: {names}"
            )
        problems += [
            f"policies.{policy}.pool_of.{key}={learner!r}: there is no such policy; there are: {names}"
            for key, learner in _policies_of_pool(section.pool_of)
            if learner not in config.policies
        ]
    return problems


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
