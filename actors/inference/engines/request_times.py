"""The pending requests of a step engine, and the seconds that requests have waited and been served."""

from collections.abc import Callable


class RequestTimes:
    """A request is added, begins and ends; an interrupted one may end before it has begun.

    ``queue_s``: seconds from each addition to the beginning; ``service_s``: from there to the end. Both are totals
    over requests that have ended.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.queue_s = self.service_s = 0.0
        self._clock = clock
        self._added: dict[str, float] = {}
        self._begun: dict[str, float] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._added or request_id in self._begun

    def has_begun(self, request_id: str) -> bool:
        """True from ``begin`` to ``end``; False for an unknown request too."""
        return request_id in self._begun

    def __len__(self) -> int:
        return len(self._added) + len(self._begun)

    def add(self, request_id: str) -> None:
        """A request begins to wait. Its id must not be that of a pending one."""
        self._added[request_id] = self._clock()

    def begin(self, request_id: str) -> None:
        """May be called again for one that has begun."""
        if (added := self._added.pop(request_id, None)) is not None:
            self._begun[request_id] = now = self._clock()
            self.queue_s += now - added

    def end(self, request_id: str) -> None:
        """Adds the request's seconds to the totals and forgets it. Raises KeyError if it is not pending."""
        if (begun := self._begun.pop(request_id, None)) is not None:
            self.service_s += self._clock() - begun
        else:
            self.queue_s += self._clock() - self._added.pop(request_id)
