"""The constructor's argument of the router."""

from dataclasses import dataclass, field

from ...core.ref import ActorRef
from ..messages import ConsoleApi
from ..names import PolicyName
from .balancing import Balancing
from .router_config import RouterConfig


@dataclass(frozen=True, slots=True)
class RouterSetup:
    policies: tuple[PolicyName, ...]
    console: ActorRef[ConsoleApi]
    config: RouterConfig = field(default_factory=RouterConfig)
    balancing: Balancing = field(default_factory=Balancing)
