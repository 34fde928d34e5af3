"""The distribution of work over rollout workers: which of them has what, and what is open when one is lost. Pure.

    deal ──> to the worker with the fewest open items ──> close
                  └─ lose(worker): its open items, which the caller closes or deals again

Items wait while there is no worker. A worker is one life of a rollout actor: after a restart it is another.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class WorkAssignment(Generic[Item]):
    def __init__(self) -> None:
        self._open: dict[str, dict[Item, None]] = {}
        self._waiting: dict[Item, None] = {}

    def __contains__(self, worker: str) -> bool:
        return worker in self._open

    def open_items(self, worker: str) -> list[Item]:
        """The items that a worker has; none of one that was lost."""
        return list(self._open.get(worker, ()))

    def has(self, worker: str, item: Item) -> bool:
        """True if the item is open, and this worker's."""
        return item in self._open.get(worker, ())

    @property
    def waiting(self) -> int:
        """Number of items that wait for a worker."""
        return len(self._waiting)

    def enlist(self, worker: str) -> dict[str, list[Item]]:
        """Adds a worker, which gets the items that waited for one."""
        self._open[worker] = {}
        waiting, self._waiting = self._waiting, {}
        return self.deal(waiting)

    def deal(self, items: Iterable[Item]) -> dict[str, list[Item]]:
        """The new items of each worker, in their order. Each goes to the worker with the fewest open ones; of several,
        to the one that was enlisted first."""
        dealt: dict[str, list[Item]] = {}
        for item in items:
            if not self._open:
                self._waiting[item] = None
                continue
            worker = min(self._open, key=lambda name: len(self._open[name]))
            self._open[worker][item] = None
            dealt.setdefault(worker, []).append(item)
        return dealt

    def close(self, worker: str, item: Item) -> bool:
        """False if the item is not, or no longer, this worker's."""
        items = self._open.get(worker, {})
        if item not in items:
            return False
        del items[item]
        return True

    def lose(self, worker: str) -> list[Item]:
        """Removes a worker. Its open items belong to no worker until they are dealt again."""
        return list(self._open.pop(worker, ()))
