"""The constructor's argument of the router."""

from dataclasses import dataclass, field

from ....core.ref import ActorRef
from ...messages import ConsoleApi
from ...names import PolicyName
from .router_config import RouterConfig
from .router_loads import RebalanceSettings


@dataclass(frozen=True, slots=True)
class RouterSetup:
    """``followers``: policies that serve each version of another one, which is named first."""

    policies: tuple[PolicyName, ...]
    console: ActorRef[ConsoleApi]
    config: RouterConfig = field(default_factory=RouterConfig)
    balancing: RebalanceSettings = field(default_factory=RebalanceSettings)
    followers: dict[PolicyName, PolicyName] = field(default_factory=dict)
