"""The requests that this side has sent to a peer and that are not finished: ids, deadlines, credit. Sans-I/O.

A request is open until the peer has processed it, or it is lost, also after its caller has given up: it holds credit
(``credit.py``) until then.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Generic

from .credit import Credit, Waiter
from .envelopes import Kind
from .messages import RequestHead

# From here on the credit of actors to which no request is open is forgotten.
_KNOWN_ACTORS = 1024


# A global name costs less than an enum's attribute.
_CALL, _IDEMPOTENT_CALL, _TELL = Kind.CALL, Kind.IDEMPOTENT_CALL, Kind.TELL


class Request(Generic[Waiter]):
    """``waiter``: waits for the answer (a future, say); None for one-way messages. ``frames``: kept for repeating."""

    __slots__ = ("abandoned", "frames", "head", "id", "kind", "size_bytes", "waiter")

    def __init__(self, request_id: int, head: RequestHead, waiter: Waiter | None, size_bytes: int) -> None:
        self.id = request_id
        self.head = head
        self.kind = head.kind
        self.waiter = waiter
        self.size_bytes = size_bytes
        self.frames: bytes | None = None
        self.abandoned = False

    @property
    def actor(self) -> str:
        return self.head.actor

    @property
    def endpoint(self) -> str:
        return self.head.endpoint


def repeatable(request: Request[Any]) -> bool:
    return request.kind is _IDEMPOTENT_CALL and not request.abandoned


class OpenRequests(Generic[Waiter]):
    """All open requests of one session, by id, ascending."""

    def __init__(self, window_requests: int, window_bytes: int) -> None:
        self.last_id = 0
        self.late_replies = 0
        self._window = window_requests, window_bytes
        self._open: dict[int, Request[Waiter]] = {}
        self._repeatable: dict[int, None] = {}
        self._credit: dict[str, Credit[Waiter]] = {}
        self._prune_at = _KNOWN_ACTORS
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Request[Waiter]]:
        return iter(self._open.values())

    # ------------------------------------------------------------------ sending

    def credit(self, actor: str) -> Credit[Waiter]:
        credit = self._credit.get(actor)
        if credit is None:
            if len(self._credit) >= self._prune_at:
                self._credit = {name: known for name, known in self._credit.items() if known.is_used}
                self._prune_at = max(_KNOWN_ACTORS, 2 * len(self._credit))
            credit = self._credit[actor] = Credit(*self._window)
        return credit

    def add(
        self, deadline: float, head: RequestHead, waiter: Waiter | None, size_bytes: int
    ) -> Request[Waiter]:
        """A request that is being sent, for which credit has been taken; ``Credit.grant`` may follow. ``deadline``: of
        a call; the reader of a stream keeps those of its items."""
        self.last_id = request_id = self.last_id + 1
        request = self._open[request_id] = Request(request_id, head, waiter, size_bytes)
        self._credit[head.actor].use(size_bytes)
        kind = head.kind
        if kind is _CALL or kind is _IDEMPOTENT_CALL:
            heapq.heappush(self._deadlines, (deadline, request_id))
            if kind is _IDEMPOTENT_CALL:
                self._repeatable[request_id] = None
        return request

    def acknowledged_below(self, next_id: int) -> int:
        """The oldest idempotent call that may still be repeated; ``next_id`` if no call may."""
        return next(iter(self._repeatable), next_id)

    # ------------------------------------------------------------------ ends

    def get(self, request_id: int) -> Request[Waiter] | None:
        """The request; None if it is finished, or its caller has given up."""
        request = self._open.get(request_id)
        return None if request is None or request.abandoned else request

    def finish(self, request_id: int) -> tuple[Request[Waiter] | None, list[Waiter]]:
        """A reply arrived: its request, None if there is no waiter for it, and the waiters that have credit now."""
        request = self._open.get(request_id)
        granted = [] if request is None else self.close(request)
        if request is None or request.abandoned:
            self.late_replies += 1
            return None, granted
        return (None if request.waiter is None else request), granted

    def done(self, ranges: list[int]) -> list[Waiter]:
        """One-way messages were processed; returns the waiters that have credit now."""
        granted: list[Waiter] = []
        known = self._open
        for request_id in self._named(ranges):
            request = known.get(request_id)
            if request is not None and request.kind is _TELL:
                del known[request_id]
                granted += self._credit[request.head.actor].give(request.size_bytes)
        return granted

    def _named(self, ranges: list[int]) -> Iterator[int]:
        """The ids of these ranges that may be open; in time proportional to the list and to the open requests."""
        pairs = list(zip(ranges[::2], ranges[1::2], strict=False))
        if sum(max(last - first, 0) for first, last in pairs) <= len(self._open):
            for first, last in pairs:
                yield from range(first, last + 1)
            return
        ids, at = list(self._open), 0
        for first, last in sorted(pairs):
            at = bisect_left(ids, first, at)
            end = max(at, bisect_right(ids, last, at))
            yield from ids[at:end]
            at = end

    def has_tells(self) -> bool:
        """True if any one-way message is not known to be processed."""
        return any(request.kind is _TELL for request in self._open.values())

    def abandon(self, request: Request[Waiter]) -> bool:
        """Its caller has given up; True if the peer should be notified. It holds its credit until it is answered."""
        if request.id not in self._open or request.abandoned:
            return False
        request.abandoned = True
        self._repeatable.pop(request.id, None)
        return True

    def close(self, request: Request[Waiter]) -> list[Waiter]:
        """The request is finished; returns the waiters that have credit now."""
        del self._open[request.id]
        if request.kind is _IDEMPOTENT_CALL:
            self._repeatable.pop(request.id, None)
        if len(self._deadlines) > 2 * len(self._open) + 1024:  # a slow one must not make the others pile up
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._open]
            heapq.heapify(self._deadlines)
        return self._credit[request.head.actor].give(request.size_bytes)

    # ------------------------------------------------------------------ the time and losses

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self._open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> list[Request[Waiter]]:
        """Abandons the requests whose deadline has passed, and returns them."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._open.get(heapq.heappop(self._deadlines)[1])
            if request is not None and self.abandon(request):
                expired.append(request)
        return expired

    def put_off(self, seconds: float) -> None:
        """Every deadline is that much later."""
        self._deadlines = [(deadline + seconds, request_id) for deadline, request_id in self._deadlines]

    def missing(self, last: int, serving: Collection[int]) -> list[Request[Waiter]]:
        """The requests up to ``last`` that the peer neither has answered nor is serving."""
        return [
            request for request in self._open.values() if request.id <= last and request.id not in serving
        ]

    def take_waiting(self) -> list[tuple[str, Waiter]]:
        """All waiters for credit, by actor; they wait no longer."""
        waiting = [(actor, waiter) for actor, credit in self._credit.items() for waiter in credit.waiting]
        for credit in self._credit.values():
            credit.waiting.clear()
        return waiting

    def waiting(self) -> Iterator[Waiter]:
        return (waiter for credit in self._credit.values() for waiter in credit.waiting)

    def waiting_for_credit(self) -> int:
        return sum(len(credit.waiting) for credit in self._credit.values())

    def close_all(self, requests: Iterable[Request[Waiter]]) -> list[Waiter]:
        """As ``close``, for each."""
        return [waiter for request in requests for waiter in self.close(request)]
