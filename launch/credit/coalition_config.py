"""The config of an evaluation in which some agents have their trained weights, and the others earlier ones."""

from collections.abc import Collection
from typing import Any, Final

from ...actors.names import AgentName
from ..config.config_reading import check
from ..config.run_config import RunConfig

_LONGEST: Final = 32
"""Characters of a policy's name."""
_ENDINGS: Final = tuple(f"_before{number}" for number in range(2, 100))


def players(trained: RunConfig, before: RunConfig) -> list[AgentName]:
    """The agents whose weights differ between the two."""
    return [
        name
        for name, agent in trained.agents.items()
        if trained.policies[agent.policy] != before.policies[agent.policy]
    ]


def coalition_config(trained: RunConfig, before: RunConfig, coalition: Collection[str]) -> RunConfig:
    """The evaluation of ``trained`` with the agents outside ``coalition`` as in ``before``. Both: of
    ``evaluation_config``, with the same agents. Agents outside have the policies
    ``<policy>_before``, also beside one of the coalition that shares their policy. Raises ConfigError."""
    raw, raw_before = trained.model_dump(mode="json"), before.model_dump(mode="json")
    policies: dict[str, Any] = {}
    for name, agent in raw["agents"].items():
        policy = agent["policy"]
        if name in coalition or trained.policies[policy] == before.policies[policy]:
            policies[policy] = raw["policies"][policy]
        else:
            agent["policy"] = _name_before(policy, raw["policies"])
            policies[agent["policy"]] = raw_before["policies"][policy]
    raw["policies"] = policies
    raw["samples"]["steps"] = max(1, raw["samples"]["steps"])
    return check(raw, f"the evaluation of {', '.join(sorted(coalition)) or 'no agent'}")


def _name_before(policy: str, policies: Collection[str]) -> str:
    names = (f"{policy[: _LONGEST - len(ending)]}{ending}" for ending in ("_before", *_ENDINGS))
    return next(name for name in names if name not in policies)
