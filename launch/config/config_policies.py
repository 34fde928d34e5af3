"""Policies as they are written, and as the schema has them.

An agent names its policy, or has a model and with it a policy of its own name:

    agents:                                           policies:
      solver: {model: M, optimizer: O, sampling: S}     solver: {model: M, optimizer: O}
      judge: {policy: solver}                         agents:
                                             ->         solver: {policy: solver, sampling: S}
                                                        judge: {policy: solver}

``agent_defaults`` holds defaults of every agent and of every policy. Everything here works on plain data, before the
schema checks it; a value that should be a section is left for the schema to refuse.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...actors.credit.credit_config import CreditConfig
from ...actors.trainer.trainer_config import LossConfig, divided_algorithm
from .config_sections import AgentConfig, PolicyConfig
from .frozen_policies import defaults_of_frozen, is_frozen, names_endpoint, with_pools, written_pool

Raw = dict[str, Any]

_OF_POLICIES = PolicyConfig.model_fields.keys() - AgentConfig.model_fields.keys()
_OF_AGENTS = AgentConfig.model_fields.keys() - PolicyConfig.model_fields.keys()
_OF_LOSSES = LossConfig.model_fields.keys() - CreditConfig.model_fields.keys()
_OF_CREDIT = CreditConfig.model_fields.keys() - LossConfig.model_fields.keys()


@dataclass(frozen=True, slots=True)
class Expanded:
    """``raw`` with a policy for every agent. ``own``: policies that are written in the agent of their name.
    ``problems``: mistakes in the references between agents and policies, one line each."""

    raw: Raw
    own: frozenset[str]
    problems: list[str]


def expanded(raw: Raw) -> Expanded:
    """Gives the form that the schema checks; a config in that form is not changed."""
    agents, policies = raw.get("agents"), raw.get("policies")
    if policies is None:
        policies = {}
    if not isinstance(policies, dict):
        return Expanded(
            raw, frozenset(), [f"policies={policies!r}: must be a section with a policy under each name"]
        )
    if not isinstance(agents, dict):
        return Expanded({**raw, "policies": policies}, frozenset(), [])
    own = frozenset(
        name for name, agent in agents.items() if isinstance(agent, dict) and agent.get("policy") is None
    )
    problems = list(_problems(agents, policies, own))
    sections, named = dict(policies), dict(agents)
    for name in own:
        named[name], sections[name] = _divided(agents[name])
        named[name]["policy"] = name
    pools = {name for name, agent in named.items() if written_pool(_policy_of(agent)) is not None}
    named, sections = with_pools(named, sections)
    named = {name: _with_name(agent, sections) for name, agent in named.items()}
    in_order = [*policies, *(name for name in agents if name in sections and name not in policies)]
    return Expanded(
        {**raw, "policies": {name: sections[name] for name in in_order}, "agents": named},
        own | pools,
        problems,
    )


def with_defaults(raw: Raw, defaults: Raw) -> Raw:
    """``defaults`` merged under each agent and each policy.

    An agent that names its policy gets neither the settings of policies nor the algorithm's name: its policy has them.
    Frozen ones do not get those of training.
    """
    merged_raw = dict(raw)
    if isinstance(agents := raw.get("agents"), dict):
        merged_raw["agents"] = {}
        for name, written in agents.items():
            agent = {} if written is None else written
            frozen = is_frozen(agent, raw) or is_frozen(merged(defaults, agent), raw)
            own = defaults_of_frozen(defaults, agent) if frozen else defaults
            of_agent, _ = _divided(own)
            names_policy = isinstance(agent, dict) and merged(of_agent, agent).get("policy") is not None
            merged_raw["agents"][name] = merged(_without_name(of_agent) if names_policy else own, agent)
    if isinstance(policies := raw.get("policies"), dict):
        merged_raw["policies"] = {}
        for name, policy in policies.items():
            _, of_policy = _divided(
                defaults_of_frozen(defaults, policy) if is_frozen(policy, raw) else defaults
            )
            merged_raw["policies"][name] = merged(of_policy, {} if policy is None else policy)
    return merged_raw


def merged(base: Any, over: Any) -> Any:
    """``over``, with the keys that it leaves out taken from ``base``; sections within them likewise."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {**base, **{key: merged(base.get(key), value) for key, value in over.items()}}


def _divided(section: Raw) -> tuple[Raw, Raw]:
    """An agent's part and a policy's part of a section with the keys of both. The algorithm's name is in both."""
    agent = {key: value for key, value in section.items() if key not in _OF_POLICIES}
    policy = {key: value for key, value in section.items() if key in _OF_POLICIES}
    algorithm = section.get("algorithm")
    if isinstance(algorithm, dict):
        agent["algorithm"], policy["algorithm"] = divided_algorithm(algorithm)
    elif "algorithm" in section:
        policy["algorithm"] = algorithm
    return agent, policy


def _without_name(agent: Raw) -> Raw:
    algorithm = agent.get("algorithm")
    if not isinstance(algorithm, dict):
        return agent
    return {**agent, "algorithm": {key: value for key, value in algorithm.items() if key != "name"}}


def _with_name(agent: Any, policies: Mapping[str, Any]) -> Any:
    """The same; if it leaves out the algorithm's name, with its policy's."""
    policy = _policy_of(agent)
    section = policies.get(policy) if isinstance(policy, str) else None
    loss = section.get("algorithm") if isinstance(section, dict) else None
    if not isinstance(loss, dict) or "name" not in loss:
        return agent
    return {**agent, "algorithm": merged({"name": loss["name"]}, agent.get("algorithm", {}))}


# --------------------------------------------------------------------------- mistakes


def _problems(agents: Raw, policies: Raw, own: frozenset[str]) -> Iterator[str]:
    pools = [name for name, agent in agents.items() if written_pool(_policy_of(agent)) is not None]
    known = [*policies, *(name for name in agents if name in own or name in pools)]
    for name, agent in agents.items():
        if name in own:
            yield from _problems_of_owner(name, agent, policies)
        elif isinstance(agent, dict):
            yield from _problems_of_user(name, agent, known, own)
    for name, policy in policies.items():
        users = [agent for agent, section in agents.items() if _policy_of(section) == name]
        if not users and name not in own:
            yield f"policies.{name}: no agent uses it: write `policy: {name}` in an agent, or leave policies.{name} out"
        if isinstance(policy, dict):
            yield from _problems_of_learner(f"policies.{name}.pool_of.policy", policy.get("pool_of"), known)
        yield from _misplaced_in_policy(name, policy, users)


def _problems_of_owner(name: str, agent: Raw, policies: Raw) -> Iterator[str]:
    if name in policies:
        yield (
            f"policies.{name}: agent {name!r} names no policy, so that it has one of its own of the same name: write "
            f"`policy: {name}` in agents.{name} to use policies.{name}, or give policies.{name} another name"
        )
    elif "model" not in agent and not _is_simulated(agent) and not names_endpoint(agent):
        there = f"; there are: {', '.join(map(str, policies))}" if policies else ""
        yield f"agents.{name}: neither `model` nor `policy`: give it a model, or write `policy: NAME`{there}"


def _problems_of_user(name: str, agent: Raw, known: list[str], own: frozenset[str]) -> Iterator[str]:
    policy = agent["policy"]
    if (pool := written_pool(policy)) is not None:
        yield from _problems_of_learner(f"agents.{name}.policy", pool, known)
        for key in _misplaced(agent, _OF_POLICIES - {"instances", "engine", "train"}, _OF_LOSSES):
            yield f"agents.{name}.{key}: the agent plays with past versions of another policy: leave it out"
        return
    if not isinstance(policy, str):
        return  # the schema refuses it
    if policy not in known:
        yield (
            f"agents.{name}.policy={policy!r}: there is no such policy; there are: {', '.join(map(str, known))}. "
            f"Write one of them, or add policies.{policy} with a model"
            if known
            else f"agents.{name}.policy={policy!r}: there is no such policy: add policies.{policy} with a model"
        )
        return
    section = f"agents.{policy}" if policy in own else f"policies.{policy}"
    model = agent.get("model")
    if isinstance(model, dict) and "tokenizer" in model:
        yield (
            f"agents.{name}.model.tokenizer={model['tokenizer']!r}: all agents of a policy have one tokenizer, its "
            f"own: write {section}.model.tokenizer, or give agent {name!r} a policy of its own (no `policy`)"
        )
    elif "model" in agent:
        yield (
            f"agents.{name}.model: agent {name!r} uses policy {policy!r}, which has a model: leave one of the two out, "
            f"agents.{name}.model or agents.{name}.policy"
        )
    for key in _misplaced(agent, _OF_POLICIES - {"model"}, _OF_LOSSES):
        yield (
            f"agents.{name}.{key}: a setting of policy {policy!r}, for all agents that use it: write {section}.{key}"
        )


def _problems_of_learner(key: str, pool: Any, known: list[str]) -> Iterator[str]:
    """``pool``: a section ``pool_of``, as it is written."""
    learner = pool.get("policy") if isinstance(pool, dict) else None
    if isinstance(learner, str) and learner not in known:
        yield f"{key}: there is no policy {learner!r}; there are: {', '.join(map(str, known))}"


def _is_simulated(policy: Raw) -> bool:
    trainer = policy.get("trainer")
    return isinstance(trainer, dict) and trainer.get("name") == "simulated"


def _misplaced_in_policy(name: str, policy: Any, users: list[str]) -> Iterator[str]:
    for key in _misplaced(policy, _OF_AGENTS - {"policy"}, _OF_CREDIT) if isinstance(policy, dict) else ():
        yield (
            f"policies.{name}.{key}: a setting of agents, each has its own: write agents.{(users or ['NAME'])[0]}.{key}"
        )


def _misplaced(section: Raw, keys: set[str], of_algorithm: set[str]) -> Iterator[str]:
    """The keys of a section that are not for it, with ``algorithm.`` before those of its algorithm."""
    yield from (key for key in section if key in keys)
    algorithm = section.get("algorithm")
    yield from (
        f"algorithm.{key}"
        for key in (algorithm if isinstance(algorithm, dict) else ())
        if key in of_algorithm
    )


def _policy_of(agent: Any) -> Any:
    return agent.get("policy") if isinstance(agent, dict) else None
