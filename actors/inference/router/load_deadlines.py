"""The deadlines of the loads that instances have begun. Pure."""

import math
from heapq import heappop, heappush

from .live_instances import LiveInstances
from .waiting_turns import RoutedInstance


class LoadDeadlines:
    """``live``: the instances. Deadlines that are over are dropped later."""

    def __init__(self, live: LiveInstances) -> None:
        self._live = live
        self._heap: list[tuple[float, int]] = []

    def begin(self, instance: RoutedInstance, now: float, limit_s: float) -> None:
        """The instance loads from ``now`` on, for ``limit_s`` seconds at most."""
        instance.loads_since_s, instance.load_by_s = now, now + limit_s
        heappush(self._heap, (instance.load_by_s, instance.number))

    def first_s(self) -> float:
        """The first deadline; infinity if no instance has one."""
        heap = self._heap
        while heap and self._of(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def _of(self, number: int) -> float | None:
        instance = self._live.get(number)
        return None if instance is None else instance.load_by_s
