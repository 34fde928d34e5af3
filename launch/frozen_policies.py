"""Frozen policies in a config: ``train: false``. Their agents generate, and nothing of them is trained.

    agents:
      judge: {model: {path: Qwen/Qwen2.5-0.5B-Instruct}, train: false}      from a hub or a folder
      rival: {init_from: runs/first/120, train: false}                      from a checkpoint

A frozen policy has instances like any other. Defaults of training (``agent_defaults``) are not for it; a key of
training that is written for it is refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ..actors.names import AgentName, PolicyName
from ..actors.trainer.trainer_config import CreditConfig
from .config_sections import OF_TRAINING, AgentConfig, PolicyConfig

Raw = dict[str, Any]

_OF_TRAINED_AGENTS = ("algorithm", "columns")


def is_frozen(agent: Any, raw: Mapping[str, Any]) -> bool:
    """True if the section of an agent or of a policy, as it is written, has or names a frozen policy of ``raw``."""
    if not isinstance(agent, dict):
        return False
    name = agent.get("policy")
    if not isinstance(name, str):
        return agent.get("train") is False
    for kind in ("policies", "agents"):
        sections = raw.get(kind)
        section = sections.get(name) if isinstance(sections, dict) else None
        if isinstance(section, dict) and section is not agent:
            return section.get("train") is False
    return False


def defaults_of_frozen(defaults: Raw) -> Raw:
    """``defaults`` of agents and policies without those of training."""
    kept = {key: each for key, each in defaults.items() if key not in (*OF_TRAINING, *_OF_TRAINED_AGENTS)}
    trainer = kept.pop("trainer", None)
    if isinstance(trainer, dict) and trainer.get("name") == "simulated":
        kept["trainer"] = {"name": "simulated"}
    return kept


def frozen_problems(
    policies: Mapping[PolicyName, PolicyConfig], agents: Mapping[AgentName, AgentConfig]
) -> Iterator[str]:
    """Mistakes about frozen policies, with their keys."""
    for name, agent in agents.items():
        if policies[agent.policy].train:
            continue
        frozen = f"policy {agent.policy!r} has train=false"
        if agent.columns:
            yield f"agents.{name}.columns.{next(iter(agent.columns))}: {frozen}, so that the agent has no samples"
        if agent.algorithm != CreditConfig():
            yield f"agents.{name}.algorithm.name={agent.algorithm.name}: {frozen}, so that its rewards train nothing"
