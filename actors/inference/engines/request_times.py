"""The pending requests of a step engine, and the seconds that requests have waited and been served."""

from collections.abc import Callable
from dataclasses import dataclass

from .engine import Phases


@dataclass(slots=True)
class _Request:
    """Times of the clock; None: not yet."""

    added: float
    begun: float | None = None
    first_token: float | None = None


class RequestTimes:
    """A request is added, begins, has its first token and ends; an interrupted one may end before any of them.

    ``queue_s``: seconds from each addition to the beginning; ``service_s``: from there to the end. Both are totals
    over requests that have ended.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.queue_s = self.service_s = 0.0
        self._clock = clock
        self._requests: dict[str, _Request] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def has_begun(self, request_id: str) -> bool:
        """True from ``begin`` to ``end``; False for an unknown request too."""
        return request_id in self._requests and self._requests[request_id].begun is not None

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str) -> None:
        """A request begins to wait. Its id must not be that of a pending one."""
        self._requests[request_id] = _Request(self._clock())

    def begin(self, request_id: str) -> None:
        """May be called again for one that has begun."""
        request = self._requests.get(request_id)
        if request is not None and request.begun is None:
            request.begun = self._clock()
            self.queue_s += request.begun - request.added

    def first_token(self, request_id: str, at: float | None = None) -> None:
        """A request that has begun has its first token: at a time of the clock, by default now. May be called
        again."""
        request = self._requests.get(request_id)
        if request is not None and request.first_token is None:
            request.first_token = self._clock() if at is None else at

    def end(self, request_id: str) -> Phases:
        """Adds the request's seconds to the totals and forgets it. Raises KeyError if it is not pending."""
        request, now = self._requests.pop(request_id), self._clock()
        if request.begun is None:
            self.queue_s += now - request.added
            return Phases(now - request.added, 0.0)
        self.service_s += now - request.begun
        first_token = now if request.first_token is None else request.first_token
        return Phases(request.begun - request.added, first_token - request.begun)
