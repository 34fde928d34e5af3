"""The requests that this side has sent to a peer and that are not finished: ids, deadlines, credit. Sans-I/O.

A request is open until the peer has processed it, or it is lost, also after its caller has given up: it holds credit
(``credit.py``) until then.
"""

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from .credit import Credit, CreditWaiter
from .envelopes import Kind
from .messages import RequestHead

# Of the endpoints that are called by name; a reference keeps those of its API itself.
_KNOWN_CALLEES = 256


class RequestWaiter(Protocol):
    """Waits for an answer: a future, say."""

    def done(self) -> bool:
        """True if it has its answer, or has given up."""
        ...


Waiter = TypeVar("Waiter", bound=RequestWaiter)


class Callee(RequestHead):
    """An endpoint of an actor, called with one timeout: all that its requests share.

    ``credit``: the actor's, the same for all its endpoints. ``is_call``: the answer has a deadline.
    """

    __slots__ = ("credit", "is_call")

    def __init__(self, kind: Kind, actor: str, endpoint: str, timeout_s: float, credit: Credit) -> None:
        """Raises LocalProtocolError if the names are too long."""
        super().__init__(kind, actor, endpoint, timeout_s)
        self.credit = credit
        self.is_call = kind is Kind.CALL


class Request(Generic[Waiter]):
    """A request that is answered. ``waiter``: waits for the answer."""

    __slots__ = ("abandoned", "callee", "id", "size_bytes", "waiter")

    def __init__(self, request_id: int, callee: Callee, waiter: Waiter, size_bytes: int) -> None:
        self.id = request_id
        self.callee = callee
        self.waiter = waiter
        self.size_bytes = size_bytes
        self.abandoned = False

    @property
    def actor(self) -> str:
        """The name of the actor that is asked."""
        return self.callee.actor

    @property
    def endpoint(self) -> str:
        """The name of its endpoint."""
        return self.callee.endpoint


class OpenRequests(Generic[Waiter]):
    """All open requests of one session, by id, ascending. Iterating gives those that are answered."""

    def __init__(self, window_requests: int, window_bytes: int) -> None:
        self.last_id = 0
        self.late_replies = 0
        self._window = window_requests, window_bytes
        self._open: dict[int, Request[Waiter]] = {}
        self._tells: dict[int, tuple[Credit, int]] = {}
        """One-way messages, for which nothing waits: the credit that each holds, and its size in bytes."""
        # Each is kept as long as one of its callees: by a request, a waiter or a reference, or among those known below.
        self._credit: WeakValueDictionary[str, Credit] = WeakValueDictionary()
        self._deadlines: list[tuple[float, int]] = []
        self.callee = lru_cache(_KNOWN_CALLEES)(self._new_callee)
        """The callee for a kind (as a number: an enum's member takes long to hash), actor, endpoint and seconds. Raises
        LocalProtocolError if the names are too long."""

    def __len__(self) -> int:
        return len(self._open) + len(self._tells)

    def __iter__(self) -> Iterator[Request[Waiter]]:
        return iter(self._open.values())

    # ------------------------------------------------------------------ sending

    def _new_callee(self, kind: int, actor: str, endpoint: str, timeout_s: float) -> Callee:
        return Callee(Kind(kind), actor, endpoint, timeout_s, self.credit(actor))

    def credit(self, actor: str) -> Credit:
        """The window towards ``actor``, one for all requests to it that are open or wait."""
        credit = self._credit.get(actor)
        if credit is None:
            credit = self._credit[actor] = Credit(*self._window)
        return credit

    def tell(self, credit: Credit, size_bytes: int) -> int:
        """The id of a one-way message that is being sent, for which ``credit`` has been taken."""
        self.last_id = request_id = self.last_id + 1
        self._tells[request_id] = credit, size_bytes
        return request_id

    def add(self, deadline: float, callee: Callee, waiter: Waiter, size_bytes: int) -> Request[Waiter]:
        """A request that is being sent, for which credit has been taken. ``deadline``: infinite, unless it is a call;
        the reader of a stream keeps those of its items."""
        self.last_id = request_id = self.last_id + 1
        request = self._open[request_id] = Request(request_id, callee, waiter, size_bytes)
        if deadline < math.inf:
            heapq.heappush(self._deadlines, (deadline, request_id))
        return request

    # ------------------------------------------------------------------ ends

    def get(self, request_id: int) -> Request[Waiter] | None:
        """The request; None if it is finished, or its caller has given up."""
        request = self._open.get(request_id)
        return None if request is None or request.abandoned else request

    def answered(self, first_id: int, count: int) -> tuple[list[Request[Waiter] | None], list[CreditWaiter]]:
        """Answers to these requests arrived: each request, None if nothing waits for its answer any more; and the
        waiters that have credit now."""
        requests, granted = self.finish(range(first_id, first_id + count))
        for index, request in enumerate(requests):
            if request is None or request.abandoned:
                self.late_replies += 1
                requests[index] = None
        return requests, granted

    def finish(self, ids: Iterable[int]) -> tuple[list[Request[Waiter] | None], list[CreditWaiter]]:
        """These requests are processed, or lost: each request, None if it is not open; and the waiters that have credit
        now."""
        requests: list[Request[Waiter] | None] = []
        granted: list[CreditWaiter] = []
        for request_id in ids:
            request = self._open.pop(request_id, None)
            requests.append(request)
            if request is not None:
                granted += request.callee.credit.give_back(1, request.size_bytes)
        if len(self._deadlines) > 2 * len(self._open) + 1024:  # a slow one must not make the others pile up
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._open]
            heapq.heapify(self._deadlines)
        return requests, granted

    def done(self, ranges: list[int]) -> list[CreditWaiter]:
        """One-way messages were processed; returns the waiters that have credit now."""
        return self._end_tells(self._named(ranges))[1]

    def lose_tells(
        self, last: float = math.inf, serving: Collection[int] = ()
    ) -> tuple[int, list[CreditWaiter]]:
        """One-way messages up to ``last`` that the peer is not serving are lost: their number, and the waiters that
        have credit now."""
        lost = [request_id for request_id in self._tells if request_id <= last and request_id not in serving]
        return self._end_tells(lost)

    def _end_tells(self, ids: Iterable[int]) -> tuple[int, list[CreditWaiter]]:
        """Those of ``ids`` that are open are processed, or lost: their number, and the waiters that have credit now."""
        tells = self._tells
        ended = [told for request_id in ids if (told := tells.pop(request_id, None)) is not None]
        granted: list[CreditWaiter] = []
        for credit, group in groupby(ended, itemgetter(0)):
            sizes = [size_bytes for _, size_bytes in group]
            granted += credit.give_back(len(sizes), sum(sizes))
        return len(ended), granted

    def _named(self, ranges: list[int]) -> Iterator[int]:
        """The ids of these ranges that may be open one-way messages; in time proportional to the list and to those
        messages."""
        pairs = list(zip(ranges[::2], ranges[1::2], strict=False))
        if sum(max(last - first, 0) for first, last in pairs) <= len(self._tells):
            for first, last in pairs:
                yield from range(first, last + 1)
            return
        ids, at = list(self._tells), 0
        for first, last in sorted(pairs):
            at = bisect_left(ids, first, at)
            end = max(at, bisect_right(ids, last, at))
            yield from ids[at:end]
            at = end

    def has_tells(self) -> bool:
        """True if any one-way message is not known to be processed."""
        return bool(self._tells)

    def abandon(self, request: Request[Waiter]) -> bool:
        """Its caller has given up; True if the peer should be notified. It holds its credit until it is answered."""
        # Credit that came back here would let a caller with short deadlines fill a slow actor's mailbox without end.
        if request.id not in self._open or request.abandoned:
            return False
        request.abandoned = True
        return True

    # ------------------------------------------------------------------ the time and losses

    def next_deadline(self) -> float | None:
        """The earliest deadline of an open request, as a time of the session's clock; None without one."""
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
        """The requests up to ``last`` that the peer neither has answered nor is serving; without one-way messages."""
        return [
            request for request in self._open.values() if request.id <= last and request.id not in serving
        ]

    def take_waiting(self) -> list[tuple[str, CreditWaiter]]:
        """All waiters for credit, by actor; they wait no longer."""
        waiting = [(actor, waiter) for actor, credit in self._credit.items() for waiter in credit.waiting]
        for credit in self._credit.values():
            credit.waiting.clear()
        return waiting

    def waiting(self) -> Iterator[CreditWaiter]:
        """The waiters for credit, of all actors."""
        return (waiter for credit in self._credit.values() for waiter in credit.waiting)

    def waiting_for_credit(self) -> int:
        """The number of waiters for credit."""
        return sum(len(credit.waiting) for credit in self._credit.values())
