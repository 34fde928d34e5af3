"""The decisions of the router."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ...messages import RouteAssigned
from ...names import PolicyName, Version
from .instance_states import InstanceState
from .waiting_turns import TurnKey


class Route(NamedTuple):
    """Send a turn of the session to an instance."""

    session: int
    routed: RouteAssigned


@dataclass(frozen=True, slots=True)
class Refuse:
    """No version that may generate the turn will be served. ``served``: the newest one."""

    turn: TurnKey
    served: Version


@dataclass(frozen=True, slots=True)
class Load:
    """Have the instance load a version, and report that by ``loaded``."""

    instance: int
    policy: PolicyName
    version: Version


@dataclass(frozen=True, slots=True)
class Installed:
    """All live instances of the policy serve ``version``."""

    policy: PolicyName
    version: Version


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the instance for its version after ``pause_s`` seconds, and report that by ``trusted`` or ``lost``."""

    instance: int
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Changed:
    """An instance has changed its state, for a reason that is worth an event of the run."""

    number: int
    instance: str
    policy: PolicyName
    state: InstanceState
    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """An instance is to serve ``taker`` instead of ``giver``, from the ``Load`` on that follows."""

    instance: int
    name: str
    giver: PolicyName
    taker: PolicyName
    reason: str


@dataclass(frozen=True, slots=True)
class NoInstances:
    """The policy has had no instance for ``seconds``, or its last one can't serve it: the run can't continue."""

    policy: PolicyName
    seconds: float
    reason: str


Decision: TypeAlias = Route | Refuse | Load | Installed | Probe | Changed | Moved | NoInstances
