"""Frozen policies in a config: ``train: false``. Their agents generate, and nothing of them is trained.

    agents:
      judge: {model: {path: Qwen/Qwen2.5-0.5B-Instruct}, train: false}      from a hub or a folder
      rival: {init_from: runs/first/120, train: false}                      from a checkpoint
      past: {policy: {pool_of: solver, every: 10, rule: pfsp}}              past versions of a policy of this run
      coach: {engine: {name: openai, ...}, train: false}                    behind an endpoint
      first: {policy: solver@0}                                             one of them: after step 0

``past`` and ``first`` have a policy of the agent's name with a section ``pool_of``, and with the model of the policy of
which they are past versions (``with_pools``).

A frozen policy has instances like any other. Defaults of training (``agent_defaults``) are not for it; a key of
training that is written for it is refused.
"""

import re
from collections.abc import Mapping
from typing import Any

from .config_sections import OF_TRAINING

Raw = dict[str, Any]

_OF_TRAINED_AGENTS = ("algorithm", "columns")
_OF_ITS_POLICY = ("model", "lora", "engine", "trainer")
_AT_STEP = re.compile(r"(\w+)@(\d+)")


def is_frozen(agent: Any, raw: Mapping[str, Any]) -> bool:
    """True if the section of an agent or of a policy, as it is written, has or names a frozen policy of ``raw``."""
    if not isinstance(agent, dict):
        return False
    name = agent.get("policy")
    if written_pool(name) is not None:
        return True
    if not isinstance(name, str):
        return _has_a_frozen_policy(agent)
    for kind in ("policies", "agents"):
        sections = raw.get(kind)
        section = sections.get(name) if isinstance(sections, dict) else None
        if isinstance(section, dict) and section is not agent:
            return _has_a_frozen_policy(section)
    return False


def _has_a_frozen_policy(section: Raw) -> bool:
    return (
        section.get("train") is False or isinstance(section.get("pool_of"), dict) or names_endpoint(section)
    )


def with_pools(agents: Raw, policies: Raw) -> tuple[Raw, Raw]:
    """Both, with a policy for each agent that names a pool of past versions, and with the model of its policy in each
    pool."""
    agents, policies = dict(agents), dict(policies)
    for name, agent in agents.items():
        pool = written_pool(agent.get("policy")) if isinstance(agent, dict) else None
        if pool is not None and name not in policies:
            of_policy = {
                key: value for key, value in agent.items() if key in ("instances", "engine", "train")
            }
            policies[name] = {"train": False, **of_policy, "pool_of": pool}
            agents[name] = {
                **{key: value for key, value in agent.items() if key not in of_policy},
                "policy": name,
            }
    for name, policy in policies.items():
        if isinstance(policy, dict) and isinstance(pool := policy.get("pool_of"), dict):
            learner = pool.get("policy")
            learner_section = policies.get(learner, agents.get(learner)) if isinstance(learner, str) else None
            policies[name] = {"train": False, **_inherit(learner_section, policy)}
    return agents, policies


def _inherit(learner: Any, pool: Raw) -> Raw:
    """``pool`` with the model, the adapter and the engine of its policy; its own options of the engine precede."""
    if not isinstance(learner, dict):
        return pool
    section = _without_training({key: learner[key] for key in _OF_ITS_POLICY if key in learner})
    for key, value in pool.items():
        both = isinstance(value, dict) and isinstance(section.get(key), dict)
        section[key] = {**section[key], **value} if both else value
    return section


def written_pool(policy: Any) -> Raw | None:
    """The section ``pool_of`` of an agent's ``policy``, as it is written; None if it is the name of a policy."""
    if isinstance(policy, dict) and "pool_of" in policy:
        return {
            "policy": policy["pool_of"],
            **{key: value for key, value in policy.items() if key != "pool_of"},
        }
    if isinstance(policy, str) and (at := _AT_STEP.fullmatch(policy)):
        return {"policy": at[1], "only": int(at[2])}
    return None


def defaults_of_frozen(defaults: Raw, section: Any) -> Raw:
    """``defaults`` of agents and policies without those of training; for a pool of past versions and for an
    endpoint, without those of models and engines too. ``section``: of the agent or policy, as it is written."""
    kept = _without_training(defaults)
    if isinstance(section, dict) and (isinstance(section.get("pool_of"), dict) or names_endpoint(section)):
        kept = {key: value for key, value in kept.items() if key not in (*_OF_ITS_POLICY, "init_from")}
    return kept


def names_endpoint(section: Raw) -> bool:
    """True if an endpoint generates for the agent or policy of this section, as it is written."""
    engine = section.get("engine")
    return isinstance(engine, dict) and engine.get("name") == "openai"


def _without_training(defaults: Raw) -> Raw:
    kept = {key: value for key, value in defaults.items() if key not in (*OF_TRAINING, *_OF_TRAINED_AGENTS)}
    trainer = kept.pop("trainer", None)
    if isinstance(trainer, dict) and trainer.get("name") == "simulated":
        kept["trainer"] = {"name": "simulated"}
    return kept
