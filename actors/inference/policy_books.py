"""The router's books of one policy: its versions, instances and turns. Pure."""

import math
from collections import OrderedDict

from ..names import Version
from .rolling_mean import RollingMean
from .waiting_turns import InstancesWithRoom, RoutedInstance, WaitingTurns


class PolicyBooks:
    """``published``: the newest version, the only one that is served. ``served_since_s``: its first acknowledgement.
    ``installing``: the instances that have not acknowledged it, of those that ``publishing`` waits for.
    ``alone_since_s``: the loss of the last instance that served or loaded a version."""

    def __init__(self, *, in_turn: bool) -> None:
        self.published: Version | None = None
        self.publishing = False
        self.installing: set[int] = set()
        self.served_since_s = math.inf
        self.alone_since_s: float | None = None
        self.last_loss = "none has joined"
        self.instances: dict[int, RoutedInstance] = {}
        self.coming = self.serving = self.turns_at_serving = 0
        self.waiting = WaitingTurns()
        self.room = InstancesWithRoom(in_turn=in_turn)
        self.dealt = 0
        self.generated = RollingMean()
        """Tokens of a turn."""
        self.pace_s = RollingMean()
        """Seconds per generated token."""
        self.prefixes: OrderedDict[str, int] = OrderedDict()

    def holds_back(self) -> bool:
        """True if the serving instances have their share of the turns and others are still loading."""
        if not self.installing:
            return False
        turns = self.waiting.count + self.turns_at_serving
        share = math.ceil(turns / (self.serving + len(self.installing)))
        return self.turns_at_serving >= share * self.serving
