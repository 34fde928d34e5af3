"""One peer as a state machine: what was asked of it, what it has asked, whether it lives. Sans-I/O: facts and the time
in, decisions out; ``connection.py`` carries them out.

Rules:
- Every request has an id, ascending on this link without a gap, a deadline, and credit (``credit.py``) that it holds
  until the peer has worked it off, whoever may still be waiting for it.
- A request is delivered at most once, and in the order of sending: a duplicate is ignored, one that was overtaken is
  refused. ONCE requests alone are sent again, after a loss or to a new incarnation of the peer, under the same id.
- A link that is not up when it is needed has ``connect_timeout_s`` to come up. When it goes down, or the peer turns out
  to be a new incarnation (a higher epoch), every request that can't be repeated fails at once.
- As long as anything depends on the peer, it is pinged every ``heartbeat_s``, and is given up within
  ``missed_heartbeats`` of them in which it is silent. They are counted in ticks that this side took, not in seconds: a
  loop that was busy itself calls nobody dead. A PONG settles what became of the requests sent before the PING: what is
  neither answered nor being served was lost.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic

from .credit import Credit, Token
from .envelopes import Kind
from .id_gaps import Skipped


@dataclass(frozen=True, slots=True)
class Settings:
    """``missed_heartbeats``: within so many, at least 2, silence is noticed. ``window_*``: how much may be under way to
    one actor of a peer; ``stream_window``: items of one stream.

    What is under way is kept by both sides: a larger window makes the garbage collector's rounds longer, and one-way
    messages slower.
    """

    heartbeat_s: float = 5.0
    missed_heartbeats: int = 3
    connect_timeout_s: float = 5.0
    window_requests: int = 1024
    window_bytes: int = 8 * 2**20
    stream_window: int = 64


DEFAULT_SETTINGS = Settings()


class LinkState(Enum):
    CONNECTING = "connecting"
    """It has not been up yet."""
    UP = "up"
    DOWN = "down"
    """It was up, and may come up again."""
    CLOSED = "closed"
    """For good."""


class LinkEvent(Enum):
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    """The link went down, or the peer said BYE, which it may do before its connection is reported."""
    CLOSED = "closed"
    """This side leaves, or the peer's process has ended for good."""


TRANSITIONS: dict[LinkState, dict[LinkEvent, LinkState]] = {
    LinkState.CONNECTING: {
        LinkEvent.CONNECTED: LinkState.UP,
        LinkEvent.DISCONNECTED: LinkState.DOWN,
        LinkEvent.CLOSED: LinkState.CLOSED,
    },
    LinkState.UP: {
        LinkEvent.DISCONNECTED: LinkState.DOWN,
        LinkEvent.CLOSED: LinkState.CLOSED,
    },
    LinkState.DOWN: {
        LinkEvent.CONNECTED: LinkState.UP,
        LinkEvent.DISCONNECTED: LinkState.DOWN,
        LinkEvent.CLOSED: LinkState.CLOSED,
    },
    LinkState.CLOSED: {
        LinkEvent.CLOSED: LinkState.CLOSED,
    },
}  # fmt: skip
"""All allowed transitions; any other event in a state is a bug of the caller. Requests can be made in any state but
CLOSED. ``fail`` (the peer refuses this side, or there is no route to it) changes no state: requests may follow."""


class Admission(Enum):
    """What becomes of a request that arrived."""

    DELIVER = "deliver"
    DUPLICATE = "duplicate"
    OVERTAKEN = "overtaken"


class Request(Generic[Token]):
    """A request of ours. ``token`` is whoever waits for it (a future, say); ``frames`` are kept for repeating it."""

    __slots__ = ("abandoned", "actor", "endpoint", "frames", "id", "kind", "size_bytes", "timeout_s", "token")

    def __init__(
        self,
        request_id: int,
        kind: Kind,
        actor: str,
        endpoint: str,
        timeout_s: float,
        token: Token | None,
        size_bytes: int,
    ) -> None:
        self.id = request_id
        self.kind = kind
        self.actor = actor
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.token = token
        self.size_bytes = size_bytes
        self.frames: bytes | None = None
        self.abandoned = False


@dataclass(slots=True)
class Decisions(Generic[Token]):
    """What the peer's owner has to do now."""

    ping: int | None = None
    """Send PING with this id."""
    expired: list[Request[Token]] = field(default_factory=list)
    """Past their deadline: tell those who wait, and CANCEL them."""
    dead: list[Request[Token]] = field(default_factory=list)
    """Will not be answered: tell those who wait, for ``reason``."""
    waiting: list[tuple[str, Token]] = field(default_factory=list)
    """(actor, token): waited for credit in vain, for ``reason``."""
    repeat: list[Request[Token]] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    """Nobody waits for these any more: CANCEL, perhaps again."""
    granted: list[Token] = field(default_factory=list)
    """Hold credit from now on."""
    lost_tells: int = 0
    """One-way messages of which nobody knows whether they were delivered."""
    reason: str = ""
    gone: bool = False
    """The peer is not there any more: nobody receives what is streamed to it."""
    silent: bool = False
    """Drop the connection: what it has not taken yet, it shall not find when it wakes up."""


@dataclass(slots=True)
class SessionStatistics:
    requests: int = 0
    in_flight: int = 0
    waiting_for_credit: int = 0
    expired: int = 0
    late_replies: int = 0
    lost: int = 0
    repeated: int = 0
    duplicates: int = 0
    overtaken: int = 0


def _repeatable(request: Request[Any]) -> bool:
    return request.kind is Kind.ONCE and not request.abandoned


class Session(Generic[Token]):
    def __init__(self, settings: Settings = DEFAULT_SETTINGS, *, up: bool = False) -> None:
        """``up``: the peer reached us, there is nothing to connect."""
        self.settings = settings
        self._state = LinkState.UP if up else LinkState.CONNECTING
        self.epoch: int | None = None
        self._newest_epoch: int | None = None
        self.statistics = SessionStatistics()
        self._open: dict[int, Request[Token]] = {}
        self._once: dict[int, None] = {}
        self._credit: dict[str, Credit[Token]] = {}
        self._last_id = 0
        self._deadlines: list[tuple[float, int]] = []
        self._connect_by: float | None = None
        self._next_tick: float | None = None
        self._heard = False
        self._missed = 0
        self._orphans: list[int] = []  # lost, and perhaps still being served
        self._pings_sent = 0  # and not answered: no PONG more than these has a say
        self._serving_streams = 0
        self._highest: int | None = None
        self._skipped = Skipped()

    # ------------------------------------------------------------------ our requests

    def credit(self, actor: str) -> Credit[Token]:
        credit = self._credit.get(actor)
        if credit is None:
            settings = self.settings
            credit = self._credit[actor] = Credit(settings.window_requests, settings.window_bytes)
        return credit

    def next_id(self) -> int:
        """For a request to be packed. Where that fails it stays a gap, which the peer takes for a loss."""
        self._last_id += 1
        return self._last_id

    def open(
        self,
        now: float,
        request_id: int,
        kind: Kind,
        actor: str,
        endpoint: str,
        timeout_s: float,
        token: Token | None,
        size_bytes: int,
    ) -> Request[Token]:
        """A request that is being sent, for which credit has been taken; ``Credit.grant`` may follow."""
        request = Request(request_id, kind, actor, endpoint, timeout_s, token, size_bytes)
        self._open[request_id] = request
        self._credit[actor].use(size_bytes)
        if (
            kind is Kind.CALL or kind is Kind.ONCE
        ):  # a stream's items have a deadline each, which its reader keeps
            heapq.heappush(self._deadlines, (now + timeout_s, request_id))
            if kind is Kind.ONCE:
                self._once[request_id] = None
        if self._next_tick is None or self._state is not LinkState.UP:
            self.need(now)
        return request

    def need(self, now: float) -> None:
        """Something depends on the peer from now on."""
        if self._next_tick is None:
            self._next_tick = now + self.settings.heartbeat_s
            self._heard, self._missed = True, 0  # no sign of life has been asked for yet
        if self._state is not LinkState.UP and self._connect_by is None:
            self._connect_by = now + self.settings.connect_timeout_s

    def floor(self, next_id: int) -> int:
        """The oldest ONCE request that may still be repeated; ``next_id`` where there is none."""
        return next(iter(self._once), next_id)

    def settle(self, request_id: int) -> tuple[Request[Token] | None, list[Token]]:
        """A reply, or the end of a one-way message: whom it is for, None where nobody waits, and who has credit now."""
        request = self._open.get(request_id)
        granted = [] if request is None else self._close(request)
        if request is None or request.abandoned:
            self.statistics.late_replies += 1
            return None, granted
        return (None if request.token is None else request), granted

    def streaming(self, request_id: int) -> Request[Token] | None:
        """Whom an item is for: None where nobody takes it any more."""
        request = self._open.get(request_id)
        return None if request is None or request.abandoned else request

    def done(self, ranges: list[int]) -> list[Token]:
        """One-way messages were worked off: who has credit now."""
        granted: list[Token] = []
        for request_id in self._named(ranges):
            request = self._open.get(request_id)
            if request is not None and request.kind is Kind.TELL:
                granted += self._close(request)
        return granted

    def _named(self, ranges: list[int]) -> Iterator[int]:
        """The ids of these ranges that may be open; in time proportional to the list and to what is open."""
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

    def open_tells(self) -> bool:
        """Whether any one-way message is not known to have been worked off."""
        return any(request.kind is Kind.TELL for request in self._open.values())

    def abandon(self, request: Request[Token]) -> bool:
        """Its caller has given up: whether the peer should be told. The credit is held until it has answered."""
        if request.id not in self._open or request.abandoned:
            return False
        request.abandoned = True
        self._once.pop(request.id, None)
        return True

    def _close(self, request: Request[Token]) -> list[Token]:
        del self._open[request.id]
        if request.kind is Kind.ONCE:
            self._once.pop(request.id, None)
        if len(self._deadlines) > 2 * len(self._open) + 1024:  # no piling up behind a slow one
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._open]
            heapq.heapify(self._deadlines)
        return self._credit[request.actor].give(request.size_bytes)

    # ------------------------------------------------------------------ their requests

    def admit(self, request_id: int, kind: int) -> Admission:
        highest = self._highest
        if highest is None or request_id == highest + 1:
            self._highest = request_id
            return Admission.DELIVER
        if request_id > highest:
            self._skipped.add(highest + 1, request_id - 1)
            self._highest = request_id
            return Admission.DELIVER
        was_skipped = self._skipped.take(request_id)
        if kind == Kind.ONCE:  # its order is not promised, and its sender's key tells a repetition
            return Admission.DELIVER
        if was_skipped:
            self.statistics.overtaken += 1
            return Admission.OVERTAKEN
        self.statistics.duplicates += 1
        return Admission.DUPLICATE

    def serve_stream(self, now: float) -> None:
        """Something here depends on the peer from now on: whether it still listens."""
        self._serving_streams += 1
        self.need(now)

    def end_stream(self) -> None:
        self._serving_streams -= 1

    # ------------------------------------------------------------------ the link and the time

    @property
    def state(self) -> LinkState:
        return self._state

    def _move(self, event: LinkEvent) -> None:
        allowed = TRANSITIONS[self._state]
        assert event in allowed, f"a link that is {self._state.value} can't be {event.value}"
        self._state = allowed[event]

    def connected(self) -> Decisions[Token]:
        self._move(LinkEvent.CONNECTED)
        self._connect_by = None
        self._heard, self._missed = True, 0
        orphans, self._orphans = self._orphans, []
        return Decisions(repeat=self._repeated(self._open.values()), cancel=orphans)

    def disconnected(self, now: float, reason: str) -> Decisions[Token]:
        """The link went down. It may come up again, for what can be repeated and for what is asked from now on."""
        self._move(LinkEvent.DISCONNECTED)
        self.epoch = None  # whoever answers next, was asked after this
        self._connect_by = None
        self._forget_theirs()
        decisions = self._fail(reason, keep_once=True)
        if self._open:
            self.need(now)
        return decisions

    def _forget_theirs(self) -> None:
        self._highest = None
        self._skipped.clear()

    def is_over(self, epoch: int) -> bool:
        """Whether that is an earlier incarnation of the peer: what it sent does not count any more."""
        return self._newest_epoch is not None and epoch < self._newest_epoch

    def heard(self, epoch: int) -> Decisions[Token] | None:
        """Anything arrived from the peer; not None where it comes from a new incarnation of it."""
        self._heard = True
        if epoch == self.epoch:
            return None
        known, self.epoch = self.epoch, epoch
        self._newest_epoch = epoch
        if known is None:
            return None
        self._forget_theirs()
        decisions = self._fail("its process was restarted", keep_once=True)
        decisions.repeat = self._repeated(self._open.values())
        return decisions

    def fail(self, reason: str) -> Decisions[Token]:
        """Every request fails, repeatable or not: the peer refuses this side, or there is no route to it."""
        return self._fail(reason, keep_once=False)

    def close(self, reason: str) -> Decisions[Token]:
        """As ``fail``, for good: nothing may be asked after this. Can be repeated."""
        self._move(LinkEvent.CLOSED)
        self._connect_by = None
        return self._fail(reason, keep_once=False)

    def pong(self, last: int, serving: Iterable[int]) -> Decisions[Token]:
        """What was sent up to ``last`` and is not being served has been answered, or lost on the way."""
        if not self._pings_sent:
            return Decisions()
        self._pings_sent -= 1
        decisions = Decisions[Token](reason="the message, or its answer, was lost on the way")
        still = set(serving)
        missing = [r for r in self._open.values() if r.id <= last and r.id not in still]
        decisions.repeat = self._repeated(missing)
        self._lose([request for request in missing if not _repeatable(request)], decisions)
        return decisions

    def wake_at(self) -> float | None:
        """When ``advance`` has work next, at the latest; None while nothing depends on the peer."""
        while self._deadlines and self._deadlines[0][1] not in self._open:
            heapq.heappop(self._deadlines)
        due = self._next_tick
        if self._deadlines and (due is None or self._deadlines[0][0] < due):
            due = self._deadlines[0][0]
        if self._connect_by is not None and (due is None or self._connect_by < due):
            due = self._connect_by
        return due

    def advance(self, now: float) -> Decisions[Token]:
        if self._connect_by is not None and self._connect_by <= now:
            self._connect_by = None
            timeout_s = self.settings.connect_timeout_s
            return self._fail(f"no connection within {timeout_s:g} s", keep_once=False)
        decisions = Decisions[Token](expired=list(self._expire(now)))
        if self._next_tick is not None and self._next_tick <= now:
            decisions = self._tick(now, decisions)
        return decisions

    def _expire(self, now: float) -> Iterator[Request[Token]]:
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._open.get(heapq.heappop(self._deadlines)[1])
            if request is not None and self.abandon(request):
                self.statistics.expired += 1
                yield request

    def _tick(self, now: float, decisions: Decisions[Token]) -> Decisions[Token]:
        if not (self._open or self._serving_streams):
            self._next_tick = None
            return decisions
        self._next_tick = now + self.settings.heartbeat_s
        if self._state is not LinkState.UP:
            return decisions
        self._missed = 0 if self._heard else self._missed + 1
        self._heard = False
        # It may have fallen silent right after a tick: the heartbeat that it was heard in counts too.
        if self._missed >= max(self.settings.missed_heartbeats - 1, 1):
            silent_s = self.settings.heartbeat_s * self._missed
            self._missed = 0
            words = f"silent for over {silent_s:g} s: it hangs, is stopped, or was cut off"
            failed = self._fail(words, keep_once=True)
            failed.expired, failed.silent = decisions.expired, True
            decisions = failed
        decisions.ping = self._last_id
        self._pings_sent += 1
        decisions.cancel = [request.id for request in self._open.values() if request.abandoned]
        return decisions

    def _fail(self, reason: str, *, keep_once: bool) -> Decisions[Token]:
        decisions = Decisions[Token](reason=reason, gone=True)
        for actor, credit in self._credit.items():
            decisions.waiting += [(actor, token) for token in credit.waiting]
            credit.waiting.clear()
        lost = [r for r in self._open.values() if not (keep_once and _repeatable(r))]
        if keep_once:
            self._orphans += [request.id for request in lost if request.kind is not Kind.TELL]
        self._lose(lost, decisions)
        return decisions

    def _lose(self, requests: list[Request[Token]], decisions: Decisions[Token]) -> None:
        for request in requests:
            decisions.granted += self._close(request)
            if request.kind is Kind.TELL:
                decisions.lost_tells += 1
            elif not request.abandoned:
                decisions.dead.append(request)
        self.statistics.lost += len(requests)

    def _repeated(self, requests: Iterable[Request[Token]]) -> list[Request[Token]]:
        repeated = [request for request in requests if _repeatable(request)]
        self.statistics.repeated += len(repeated)
        return repeated

    def snapshot(self) -> SessionStatistics:
        self.statistics.requests = self._last_id
        self.statistics.in_flight = len(self._open)
        self.statistics.waiting_for_credit = sum(len(credit.waiting) for credit in self._credit.values())
        return self.statistics
