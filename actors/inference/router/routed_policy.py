"""The router's state of one policy: its versions, its instances, its waiting turns. Pure."""

import math
from collections import OrderedDict
from typing import Final

from ...messages import RouteAssigned
from ...names import Version
from ...rolling_mean import RollingMean
from .cut_links import CutLinks
from .turn_lengths import LENGTHS, Lengths, TurnLengths
from .waiting_turns import InstancesWithRoom, RoutedInstance, RoutedTurn, TurnTotals, WaitingTurns

_REMEMBERED_PREFIXES: Final = 16384


class RoutedPolicy:
    """``published``: the newest version, the only one that is served. ``served_since_s``: its first acknowledgement.
    ``installing``: the instances that have not acknowledged it, of those that ``publishing`` waits for.
    ``no_instance_since_s``: the loss of the last instance that served or loaded a version. ``loading_count``: instances
    that have joined and serve no version yet. ``shared``: its instances serve other policies at the same time.

    ``in_turn``: turns are dealt to the instances in turn, regardless of their load. ``lengths``: the predictor of the
    tokens that turns generate.
    """

    def __init__(self, *, in_turn: bool, lengths: Lengths = "mean") -> None:
        self.published: Version | None = None
        self.publishing = False
        self.installing: set[int] = set()
        self.served_since_s = math.inf
        self.no_instance_since_s: float | None = None
        self.last_loss = "none has joined"
        self.instances: dict[int, RoutedInstance] = {}
        self.loading_count = self.serving = self.turns_at_serving = 0
        self.shared = False
        self.waiting = WaitingTurns()
        self.room = InstancesWithRoom(in_turn=in_turn)
        self.lengths: TurnLengths = LENGTHS[lengths]()
        self.pace_s = RollingMean()
        """Seconds per generated token."""
        self.totals = TurnTotals()
        """Since the start."""
        self._in_turn = in_turn
        self._dealt = 0
        self._prefixes: OrderedDict[str, int] = OrderedDict()

    def return_by_s(self, timeout_s: float) -> float:
        """The time until which the policy may be without an instance; infinity if it has one, or needs none yet."""
        if self.published is None or self.no_instance_since_s is None:
            return math.inf
        return self.no_instance_since_s + timeout_s

    def latest_s(self, downstream_tokens: float, topic: str, now: float) -> float:
        """The time at which a turn that is asked for at ``now`` should be under way: earlier by the time of the turns
        behind it, and by that of its own tokens beyond the mean."""
        beyond = self.lengths.expected(topic) - self.lengths.mean.value
        return now - (downstream_tokens + beyond) * self.pace_s.value

    def next_turn(self, links: CutLinks) -> tuple[RoutedTurn, RoutedInstance] | None:
        """The turn to be routed next and its instance, if there are both; the turn waits no longer. ``links``: those
        that are cut."""
        if self.published is None or not self.waiting.count or self._holds_back():
            return None
        if links.any_at_fault:
            return self._next_that_reaches(self.published, links)
        # The instance first: a turn that has left its queue can't go back to its place.
        least = self.room.least(self.instances)
        turn = None if least is None else self.waiting.pop_first(self.published)
        if least is None or turn is None:
            return None
        if len(self.instances) > 1 and not self._in_turn:
            least = self._choose_instance(turn, least)
        return turn, least

    def _next_that_reaches(
        self, version: Version, links: CutLinks
    ) -> tuple[RoutedTurn, RoutedInstance] | None:
        """As ``next_turn`` while links are cut: goes over all waiting turns at worst, which pays as
        links are seldom cut."""
        room = [instance for instance in self.instances.values() if instance.has_room]
        for turn in self.waiting.in_order(version) if room else ():
            reached = [instance for instance in room if links.is_open(turn.key[0], instance.load.numbers[0])]
            if reached:
                self.waiting.end(turn)
                return turn, min(
                    reached, key=lambda instance: instance.dealt if self._in_turn else instance.load.tokens
                )
        return None

    @property
    def first_latest_s(self) -> float:
        """``latest_s`` of the turn that is routed next; infinity without one."""
        return math.inf if self.published is None else self.waiting.first_latest_s(self.published)

    def route(self, turn: RoutedTurn, instance: RoutedInstance, now: float) -> RouteAssigned:
        """Adds the turn to those at the instance."""
        turn.instance, turn.routed_s = instance, now
        # At least one: until a first turn has ended the mean is 0, and a turn with a short prompt would count for
        # nothing.
        turn.tokens = tokens = turn.prompt_tokens + max(1.0, self.lengths.expected(turn.topic))
        instance.turns[turn.key] = turn
        self._dealt += 1
        instance.dealt = self._dealt
        self.turns_at_serving += 1
        instance.load.add(1, tokens)
        ready_s = max(turn.asked_s, self.served_since_s)
        for totals in (instance.load.totals, self.totals):
            totals.queue_s += now - ready_s
        assert instance.version is not None
        return RouteAssigned(
            turn.key[1], instance.number, instance.version, ready_s - turn.asked_s, now - ready_s
        )

    def _holds_back(self) -> bool:
        """True if the serving instances have their share of the turns and others are still loading."""
        if not self.installing:
            return False
        turns = self.waiting.count + self.turns_at_serving
        share = math.ceil(turns / (self.serving + len(self.installing)))
        return self.turns_at_serving >= share * self.serving

    def _choose_instance(self, turn: RoutedTurn, least: RoutedInstance) -> RoutedInstance:
        """The instance that knows the beginning of the prompt, if it has little more to do than ``least``."""
        # No instance is asked for the prompts that it has in its cache: that would cost a message for each turn. The
        # last one that had the prefix is a good guess. Numbers begin at 1, so that 0 is unknown.
        prefixes = self._prefixes
        target = self.instances.get(prefixes.get(turn.prefix, 0), least)
        if (
            target is least
            or not target.has_room
            or target.load.tokens - least.load.tokens >= turn.prompt_tokens
        ):
            target = least
        prefixes[turn.prefix] = target.number
        prefixes.move_to_end(turn.prefix)
        if len(prefixes) > _REMEMBERED_PREFIXES:
            prefixes.popitem(last=False)
        return target
