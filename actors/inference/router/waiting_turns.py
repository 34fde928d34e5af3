"""The turns of one policy that wait for an instance, and its instances with room for one. Pure, O(log n) per event."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

from ...names import PolicyName, Version
from .instance_states import InstanceState

_SERVING: Final = InstanceState.SERVING
# Entries of a heap that are out of date are left in it, since removing from its middle takes O(n): they are dropped
# when they come to the top, and the heap is built again when they are the greater part. Small heaps are never built
# again.
_SLACK: Final = 64

TurnKey = tuple[int, int]
"""The session and the number of a turn."""
Versions = tuple[Version, Version | None]
"""The oldest and the newest version that may generate a turn, as in ``VersionRange``."""


@dataclass(slots=True)
class TurnTotals:
    """``queue_s``: seconds that turns waited for room; ``service_s``: that they were at an instance."""

    turns: int = 0
    queue_s: float = 0.0
    service_s: float = 0.0


class InstanceLoad:
    """The turns that one incarnation of an instance has, of all its policies. ``turns``: their number, at most
    ``capacity``. ``tokens``: expected, of these turns. ``parts``: one for each policy that it serves at the same time,
    those that have left taken out. ``numbers``: of all parts. ``is_shared``: it serves more than one policy."""

    __slots__ = ("capacity", "is_shared", "numbers", "parts", "tokens", "totals", "turns")

    def __init__(self, capacity: int, numbers: tuple[int, ...]) -> None:
        self.capacity, self.numbers, self.is_shared = capacity, numbers, len(numbers) > 1
        self.turns = 0
        self.tokens = 0.0
        self.totals = TurnTotals()
        """Since the instance joined."""
        self.parts: list[RoutedInstance] = []

    def add(self, turns: int, tokens: float) -> None:
        """Adds turns, or takes them away."""
        self.turns += turns
        # Exactly 0 without turns: a sum of floats would keep a rest, by which idle instances would be ranked.
        self.tokens = self.tokens + tokens if self.turns else 0.0
        for part in self.parts:
            part.room.changed(part)


class RoutedInstance:
    """An instance as one of its policies has it: an instance that serves several policies at the same time has one of
    these for each, with a number of its own, and one ``load``. ``turns``: of this policy. ``dealt``: the number of its
    newest turn, among all of its policy. ``room``: of its policy. ``version``: None unless it serves."""

    __slots__ = (
        "dealt", "is_probed", "load", "load_by_s", "loads_since_s", "moved_from", "moves_to", "name",
        "number", "policy", "read_fails_since_s", "room", "state", "state_reason", "stays_until_s", "turns",
        "version",
    )  # fmt: skip

    def __init__(
        self, number: int, name: str, policy: PolicyName, load: InstanceLoad, room: "InstancesWithRoom"
    ) -> None:
        self.number, self.name, self.policy, self.load, self.room = number, name, policy, load, room
        load.parts.append(self)
        self.state = InstanceState.JOINING
        self.version: Version | None = None
        self.load_by_s: float | None = None
        """The deadline of the version that it loads."""
        self.loads_since_s = 0.0
        self.moves_to: PolicyName | None = None
        self.moved_from: PolicyName | None = None
        """The policy that it served before, while it loads the weights of another."""
        self.is_probed = False
        """It is suspected, and is asked whether it lives."""
        self.read_fails_since_s: float | None = None
        """The first of its loads, since it served, that could not read a version."""
        self.stays_until_s = 0.0
        """It does not move before."""
        self.state_reason = ""
        """The reason to report it when it serves."""
        self.dealt = 0
        self.turns: dict[TurnKey, RoutedTurn] = {}

    @property
    def has_room(self) -> bool:
        """True if it serves and may get another turn now: its capacity counts the turns of all its policies
        together."""
        return self.state is _SERVING and self.load.turns < self.load.capacity


@dataclass(slots=True, eq=False)
class RoutedTurn:
    """A turn that has been asked for. ``latest_s``: the time at which it should be under way, so that the turns behind
    it come no later than those behind others. ``instance``: the one that has the turn."""

    key: TurnKey
    policy: PolicyName
    versions: Versions
    prompt_tokens: int
    prefix: str
    asked_s: float
    latest_s: float
    topic: str = ""
    instance: RoutedInstance | None = None
    tokens: float = 0.0
    """Expected; counted in the instance's."""
    routed_s: float = 0.0
    ended: bool = False


@dataclass(slots=True)
class _Queue:
    """Turns with the same versions; those that have ended are dropped later."""

    heap: list[tuple[float, TurnKey, RoutedTurn]] = field(default_factory=list)
    ended: int = 0

    def first(self) -> RoutedTurn | None:
        heap = self.heap
        while heap and heap[0][2].ended:
            heappop(heap)
            self.ended -= 1
        return heap[0][2] if heap else None

    def drop_ended(self) -> None:
        """To be called when one has ended: keeps the heap at most twice as long as the queue."""
        self.ended += 1
        if self.ended > _SLACK and 2 * self.ended > len(self.heap):
            self.heap = [entry for entry in self.heap if not entry[2].ended]
            heapify(self.heap)
            self.ended = 0


class WaitingTurns:
    """Waiting turns in the order of ``latest_s``, and of age if that is equal. ``count``: all of them."""

    def __init__(self) -> None:
        self._queues: dict[Versions, _Queue] = {}
        self.count = 0

    def add(self, turn: RoutedTurn) -> None:
        """Takes a turn that waits from now on, whose ``latest_s`` is final."""
        queue = self._queues.get(turn.versions)
        if queue is None:
            queue = self._queues[turn.versions] = _Queue()
        heappush(queue.heap, (turn.latest_s, turn.key, turn))
        self.count += 1

    def end(self, turn: RoutedTurn) -> None:
        """Removes a turn that waits, which has ended or is routed out of its turn."""
        turn.ended = True
        self._queues[turn.versions].drop_ended()
        self.count -= 1

    def pop_first(self, version: Version) -> RoutedTurn | None:
        """Removes and returns the first turn that ``version`` may generate, if no turn is too old for it."""
        best = self._first_queue(version)
        if best is None:
            return None
        self.count -= 1
        return heappop(best.heap)[2]

    def first_latest_s(self, version: Version) -> float:
        """``latest_s`` of the turn that ``pop_first`` would return; infinity without one."""
        best = self._first_queue(version)
        return math.inf if best is None else best.heap[0][0]

    def _first_queue(self, version: Version) -> _Queue | None:
        # A queue for each range of versions, and a look at the first of each: one heap for all could have any number of
        # turns that wait for a later version before the first that may go. There are few ranges, one per step under
        # way.
        best: _Queue | None = None
        empty = []
        for versions, queue in self._queues.items():
            if versions[0] > version:
                continue
            if queue.first() is None:
                empty.append(versions)
            elif best is None or queue.heap[0][:2] < best.heap[0][:2]:
                best = queue
        for versions in empty:
            del self._queues[versions]
        return best

    def for_version(self, version: Version) -> int:
        """The number of turns that ``version`` may generate, if no turn is too old for it."""
        queues = self._queues.items()
        return sum(len(queue.heap) - queue.ended for versions, queue in queues if versions[0] <= version)

    def in_order(self, version: Version) -> list[RoutedTurn]:
        """The turns that ``version`` may generate, if no turn is too old for it, in the order of ``pop_first``."""
        entries = [
            entry
            for versions, queue in self._queues.items()
            if versions[0] <= version
            for entry in queue.heap
        ]
        return [entry[2] for entry in sorted(entries, key=lambda e: e[:2]) if not entry[2].ended]

    def take_older_than(self, version: Version) -> list[RoutedTurn]:
        """Removes and returns the turns that ``version`` and later ones may not generate."""
        turns = []
        for versions in list(self._queues):
            newest = versions[1]
            if newest is not None and newest < version:
                queue = self._queues.pop(versions)
                turns += [entry[2] for entry in sorted(queue.heap, key=lambda e: e[:2]) if not entry[2].ended]
        self.count -= len(turns)
        return turns


class InstancesWithRoom:
    """Serving instances with room. First the one with the fewest expected tokens; or, if they are dealt turns
    ``in_turn``, the one whose newest turn is the oldest."""

    def __init__(self, *, in_turn: bool = False) -> None:
        self._in_turn = in_turn
        self._heap: list[tuple[float, int, RoutedInstance]] = []

    def changed(self, instance: RoutedInstance) -> None:
        """To be called when it begins to serve, or its load has changed."""
        load = instance.load
        if load.turns < load.capacity:
            rank = instance.dealt if self._in_turn else load.tokens
            heappush(self._heap, (rank, instance.number, instance))

    def least(self, instances: Mapping[int, RoutedInstance]) -> RoutedInstance | None:
        """The first instance. ``instances``: all of the policy, by number."""
        heap = self._heap
        # Every turn pushes an entry, and those behind the first are never looked at: without this they would pile up.
        if len(heap) > 8 * len(instances) + _SLACK:
            heap.clear()
            for candidate in instances.values():
                if candidate.has_room:
                    self.changed(candidate)
        while heap:
            rank, _, instance = heap[0]
            if rank == (instance.dealt if self._in_turn else instance.load.tokens) and instance.has_room:
                return instance
            heappop(heap)  # it has changed since: if it has room, another entry says so
        return None

    def drop(self, instance: RoutedInstance) -> None:
        """To be called when it moves to another policy."""
        self._heap = [entry for entry in self._heap if entry[2] is not instance]
        heapify(self._heap)

    def clear(self) -> None:
        """To be called when no instance serves any more."""
        self._heap.clear()
