"""The config as its author writes it: defaults for all agents and policies, and the keys of ``RunConfig``.

    agent_defaults: {optimizer: {lr: 1.0e-6}}       policies:
    agents:                                           solver: {model: M, optimizer: {lr: 1.0e-6}}
      solver: {model: M, sampling: S}          ->   agents:
      judge: {policy: solver}                         solver: {policy: solver, sampling: S}
                                                      judge: {policy: solver}

Here the sections of agents and policies are put over their defaults. An agent with a policy of its own is the schema's
(``AgentWithPolicyConfig``). Mistakes are found in the whole, and named by the keys that were written.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, ConfigDict, Field

from ...actors.config_base import Config
from ...actors.credit.credit_config import CreditConfig
from ...actors.trainer.trainer_config import LossConfig
from .config_sections import OF_TRAINING, AgentConfig, PolicyConfig, names_own_policy, pool_section

Location = tuple[int | str, ...]


def _empty_for_null(section: Any) -> Any:
    return {} if section is None else section


Section = Annotated[dict[str, Any], BeforeValidator(_empty_for_null)]
Sections = Annotated[dict[str, Section], BeforeValidator(_empty_for_null)]

_OF_POLICIES: Final = PolicyConfig.model_fields.keys() - AgentConfig.model_fields.keys()
_OF_LOSSES: Final = LossConfig.model_fields.keys() - CreditConfig.model_fields.keys()
_OF_CREDIT: Final = CreditConfig.model_fields.keys() - LossConfig.model_fields.keys()
# The weights that past versions have from their policy, and that an endpoint has itself.
_OF_WEIGHTS: Final = ("model", "lora", "engine", "trainer")
_KEY: Final = re.compile(r"\b((?:agents|policies)(?:\.\w+)+)(=?)")


class Defaults(Config):
    """Defaults of all agents and policies. A section of one of them has precedence, key by key."""

    agent_defaults: Annotated[Section, Field(default_factory=dict)]
    """Keys of agents and of policies, for all of them."""
    engine: Annotated[Section, Field(default_factory=dict)]
    """Keys of `policies.<policy>.engine`, for all policies. They precede those of `agent_defaults`."""
    trainer: Annotated[Section, Field(default_factory=dict)]
    """Keys of `policies.<policy>.trainer`, for all policies. They precede those of `agent_defaults`."""
    init_from: str | None = None
    """Run whose weights all trained policies start from, unless `agent_defaults` names another."""


class WrittenConfig(Defaults):
    """Other keys than these are those of ``RunConfig``, which checks them. Sections are as they are written."""

    model_config = ConfigDict(extra="allow")

    agents: Sections
    policies: Annotated[Sections, Field(default_factory=dict)]

    def complete(self) -> dict[str, Any]:
        """The keys of ``RunConfig``: agents and policies over their defaults."""
        policies = {name: self._policy(name) for name in self.policies}
        agents = {name: self._agent(name) for name in self.agents}
        return {**(self.model_extra or {}), "policies": policies, "agents": agents}

    def policy_of(self, agent: str) -> str:
        """The policy that an agent names; its own name if it names none."""
        if self.has_own_policy(agent):
            return agent
        return str(merged(self.agent_defaults, self.agents[agent])["policy"])

    def has_own_policy(self, agent: int | str) -> bool:
        """True for an agent that names no policy, so that it has one of its own."""
        section = self.agents.get(str(agent))
        return section is not None and names_own_policy(merged(self.agent_defaults, section))

    # ------------------------------------------------------------------ sections over their defaults

    def _policy(self, name: str) -> dict[str, Any]:
        defaults = {key: value for key, value in self._defaults().items() if key in PolicyConfig.model_fields}
        section = self.policies[name]
        return merged(self._inherit(section, _without(defaults, _OF_CREDIT)), section)

    def _agent(self, name: str) -> dict[str, Any]:
        section, defaults = self.agents[name], self._defaults()
        if self.has_own_policy(name):
            return merged(self._inherit(section, defaults), section)
        # Its policy has the settings of policies, and names the algorithm.
        kept = {key: value for key, value in defaults.items() if key not in _OF_POLICIES}
        policy = self._policy_section(self.policy_of(name))
        if _is_frozen(policy):
            kept = {key: value for key, value in kept.items() if key not in ("algorithm", "columns")}
        algorithm, kept = policy.get("algorithm"), _without(kept, {*_OF_LOSSES, "name"})
        if isinstance(algorithm, dict) and "name" in algorithm:
            kept = merged(kept, {"algorithm": {"name": algorithm["name"]}})
        return merged(kept, section)

    def _defaults(self) -> dict[str, Any]:
        shared = {key: value for key in ("engine", "trainer") if (value := getattr(self, key))}
        init_from = {} if self.init_from is None else {"init_from": self.init_from}
        return merged(merged(init_from, self.agent_defaults), shared)

    def _policy_section(self, policy: str) -> dict[str, Any]:
        """The section in which a policy is written, over its defaults; an empty one if there is no such policy."""
        if policy in self.policies:
            return self._policy(policy)
        return self._agent(policy) if self.has_own_policy(policy) else {}

    def _inherit(self, section: Mapping[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
        """The defaults of the section of a policy: those of training are not for a frozen one, nor is ``init_from``,
        which would make a fixed opponent the trained policy of another run. An endpoint has the weights itself, past
        versions have what their policy has."""
        whole = merged(defaults, section)
        if not _is_frozen(whole):
            return defaults
        kept = _without_training(
            {key: value for key, value in defaults.items() if key not in ("columns", "init_from")}
        )
        pool = pool_section(whole) or _find_explored(whole)
        if pool is None and not _names_endpoint(section):
            return kept
        kept = {key: value for key, value in kept.items() if key not in _OF_WEIGHTS}
        return kept if pool is None else {"train": False, **kept, **self._weights_of(pool, section)}

    def _weights_of(self, pool: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
        """The weights and the engine of the policy that ``pool`` names, for its past versions; options of the engine in
        their own ``section`` precede."""
        name = str(pool.get("policy"))
        written = self.policies.get(name) or merged(self.agent_defaults, self.agents.get(name, {}))
        if pool_section(written) is not None or _find_explored(written) is not None:
            return {}  # a pool of a pool, which is refused
        learner = self._policy_section(name)
        weights = _without_training({key: learner[key] for key in _OF_WEIGHTS if key in learner})
        if "model" in section:  # an explorer's, of another size
            weights = {key: value for key, value in weights.items() if key not in ("model", "lora")}
        if _name_of(section.get("engine")) not in (None, _name_of(learner.get("engine"))):
            weights.pop("engine", None)  # another engine, with other options
        return weights

    # ------------------------------------------------------------------ the keys that were written

    def key(self, *location: int | str) -> str:
        """``agent_defaults.model.path`` for ``policies.solver.model.path`` of the whole, if it is written there."""
        return ".".join(map(str, self._origin(self._in_agents(location)) if location else ()))

    def in_text(self, text: str) -> str:
        """``text`` with the keys in it replaced by those that are written: keys with a value, ``key=value``, by the
        place of the value; others, such as those of a remedy, by their agent's if their policy is an agent's own."""

        def replace(match: re.Match[str]) -> str:
            location = self._in_agents(tuple(match[1].split(".")))
            return ".".join(map(str, self._origin(location) if match[2] else location)) + match[2]

        return _KEY.sub(replace, text)

    def _in_agents(self, location: Location) -> Location:
        """The place of a setting in the agent whose own policy has it."""
        kind, name = (*location, "", "")[:2]
        agent = self.agents.get(str(name))
        if (
            kind not in ("agents", "policies")
            or agent is None
            or (kind == "policies" and name in self.policies)
        ):
            return location
        if "pool_of" in location[2:3] and "pool_of" not in agent:  # written as the agent's policy
            rest = () if isinstance(agent.get("policy"), str) else location[3:]
            return ("agents", name, "policy", *("pool_of" if part == "policy" else part for part in rest))
        return ("agents", *location[1:])

    def _origin(self, location: Location) -> Location:
        """The place of a value, or of the section in which it is missing: in ``location``, or among the defaults."""
        if location[0] not in ("agents", "policies"):
            return location
        written, rest = getattr(self, location[0]), location[2:]
        places: Sequence[tuple[Location, Mapping[str, Any]]] = (
            (location[:2], written.get(location[1], {}) if rest else {}),
            ((), {key: value for key in ("engine", "trainer") if (value := getattr(self, key))}),
            (("agent_defaults",), self.agent_defaults),
            ((), {} if self.init_from is None else {"init_from": self.init_from}),
        )
        for length in range(len(rest), 0, -1):
            for place, section in places:
                if _holds(section, rest[:length]):
                    return (*place, *rest)
        return location


UNCHANGED: Final = WrittenConfig.model_validate({"agents": {}})
"""For a resolved config, whose keys are those that are written."""


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over``, with the keys that it leaves out taken from ``base``; sections within them likewise."""
    whole = {**base, **over}
    for key in base.keys() & over.keys():
        if isinstance(base[key], dict) and isinstance(over[key], dict):
            whole[key] = merged(base[key], over[key])
    return whole


def _without(section: dict[str, Any], of_algorithm: set[str]) -> dict[str, Any]:
    """The same without these keys of its algorithm."""
    if not isinstance(algorithm := section.get("algorithm"), dict):
        return section
    return {**section, "algorithm": {key: algorithm[key] for key in algorithm if key not in of_algorithm}}


def _without_training(section: Mapping[str, Any]) -> dict[str, Any]:
    """The same without the keys of training; of a trainer only that it is simulated."""
    kept = {key: value for key, value in section.items() if key not in (*OF_TRAINING, "trainer")}
    return kept | (
        {"trainer": {"name": "simulated"}} if _name_of(section.get("trainer")) == "simulated" else {}
    )


def _is_frozen(section: Mapping[str, Any]) -> bool:
    has_source = pool_section(section) is not None or _find_explored(section) is not None
    return section.get("train") is False or has_source or _names_endpoint(section)


def _find_explored(section: Mapping[str, Any]) -> dict[str, Any] | None:
    """The policy that an explorer has its weights of, as the section of a pool."""
    explored = section.get("explores")
    return {"policy": explored} if isinstance(explored, str) else None


def _names_endpoint(section: Mapping[str, Any]) -> bool:
    return bool(_name_of(section.get("engine")) == "openai")


def _name_of(section: Any) -> Any:
    return section.get("name") if isinstance(section, dict) else None


def _holds(section: Any, path: Sequence[int | str]) -> bool:
    for part in path:
        if not isinstance(section, dict) or part not in section:
            return False
        section = section[part]
    return True
