"""One peer as a state machine: its link, its life, the requests in both directions. Sans-I/O: events and the time in,
effects out; ``connection.py`` carries them out.

Rules:
- Every request has an id, ascending on this link without a gap, a deadline, and credit (``credit.py``) that it holds
  until the peer has processed it, also after its caller has given up.
- A request is delivered at most once, and in the order of sending: a duplicate is ignored, a late one is refused. None
  is sent again: only its caller knows if it may run twice.
- A request that has failed here does not begin there later: the peer begins no request of a sender that it has not
  heard for long (``lease.py``), and each connection but the first begins with the withdrawal of all requests sent
  before.
- A link that is not up when it is needed has ``connect_timeout_s`` to come up. When it goes down, or the peer turns out
  to be a new incarnation (another epoch), every request that was sent fails at once.
- As long as anything depends on the peer, it is pinged every ``heartbeat_s``, and is given up within
  ``missed_heartbeats`` of them in which it is silent. They are counted in ticks of this side, not in seconds: a loop
  that was busy itself declares no peer dead. A PONG settles the requests sent before the PING: those that are neither
  answered nor being served were lost.
- A trusted peer, whose end this side learns in another way, may be silent for as long as it is stopped.
- Deadlines count the time in which this side runs: one that was stopped itself (SIGSTOP, a frozen container) for more
  than a heartbeat puts them off.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic

from .credit import CreditWaiter
from .incarnations import Incarnations, lineage_of
from .open_requests import OpenRequests, Request, Waiter


@dataclass(frozen=True, slots=True)
class Settings:
    """``missed_heartbeats``: silence is noticed within this many, at least 2. ``window_*``: the requests and bytes that
    may be in flight to one actor of a peer; ``stream_window``: the items of one stream.

    Both sides hold the requests in flight: a larger window makes rounds of the garbage collector longer, and one-way
    messages slower.
    """

    heartbeat_s: float = 5.0
    missed_heartbeats: int = 3
    connect_timeout_s: float = 5.0
    window_requests: int = 1024
    window_bytes: int = 8 * 2**20
    stream_window: int = 64

    @property
    def ticks_of_silence(self) -> int:
        """The heartbeats in a row without a sign of life after which a peer is given up."""
        # One less than may be missed: the peer may have fallen silent right after a tick, and the heartbeat of its last
        # message counts too.
        return max(self.missed_heartbeats - 1, 1)

    @property
    def silence_s(self) -> float:
        """The least time in seconds for which a peer that is given up has been silent."""
        return self.heartbeat_s * self.ticks_of_silence


DEFAULT_SETTINGS = Settings()

# Lineages that have followed one another at one address, and are remembered as over.
_REMEMBERED_LINEAGES = 64
# A late id of a range that is forgotten is taken for a duplicate: its sender learns from the next PONG that the request
# was lost.
_REMEMBERED_GAPS = 256


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
    """The handling of a request that arrived."""

    DELIVER = "deliver"
    DUPLICATE = "duplicate"
    OUT_OF_ORDER = "out of order"


# A global name costs less than an enum's attribute.
_DELIVER = Admission.DELIVER


@dataclass(slots=True)
class Effects(Generic[Waiter]):
    """The work that an event causes for the owner of the session."""

    ping: int | None = None
    """Send PING with this id."""
    expired: list[Request[Waiter]] = field(default_factory=list)
    """Past their deadline: fail their waiters, and send CANCEL."""
    dead: list[Request[Waiter]] = field(default_factory=list)
    """Will not be answered: fail their waiters, with ``reason``."""
    waiting: list[tuple[str, CreditWaiter]] = field(default_factory=list)
    """(actor, waiter): waiters for credit that will get none: fail them, with ``reason``."""
    cancel: list[int] = field(default_factory=list)
    """Send CANCEL for these, perhaps again: their callers have given up."""
    withdraw: int = 0
    """If not 0: send CANCEL for all requests up to this id at once. Some may be in a connection that delivers late."""
    granted: list[CreditWaiter] = field(default_factory=list)
    """Hold credit from now on."""
    lost_tells: int = 0
    """One-way messages with unknown delivery."""
    reason: str = ""
    gone: bool = False
    """The peer has left: streams to it have no reader any more."""
    silent: bool = False
    """Close the connection and discard unsent messages, so that a resumed peer gets no stale ones."""


@dataclass(slots=True)
class SessionStatistics:
    """``in_flight`` and ``waiting_for_credit`` are current values; the rest are counts since the start."""

    requests: int = 0
    in_flight: int = 0
    waiting_for_credit: int = 0
    expired: int = 0
    late_replies: int = 0
    lost: int = 0
    duplicates: int = 0
    out_of_order: int = 0


class IdGaps:
    """Gaps in the received ids, which distinguish a late request from a duplicate: ranges, ascending. Takes bounded
    time and memory, however large the ranges are."""

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, first: int, last: int) -> None:
        """``first`` is above all ids that were added before."""
        self._ranges.append((first, last))
        del self._ranges[:-_REMEMBERED_GAPS]

    def take(self, number: int) -> bool:
        """Removes ``number``; False if it is in no gap."""
        at = bisect_right(self._ranges, number, key=lambda gap: gap[0]) - 1
        if at < 0 or number > self._ranges[at][1]:
            return False
        first, last = self._ranges[at]
        parts = ((first, number - 1), (number + 1, last))
        self._ranges[at : at + 1] = [gap for gap in parts if gap[0] <= gap[1]]
        del self._ranges[:-_REMEMBERED_GAPS]
        return True

    def clear(self) -> None:
        """Forgets all ids."""
        self._ranges.clear()


class Session(Generic[Waiter]):
    def __init__(
        self, settings: Settings = DEFAULT_SETTINGS, *, up: bool = False, trusted: bool = False
    ) -> None:
        """``up``: the peer has connected to this side. ``trusted``: it is never given up for its silence, nor for the
        time that a connection to it takes."""
        self.settings = settings
        self.trusted = trusted
        self.requests: OpenRequests[Waiter] = OpenRequests(settings.window_requests, settings.window_bytes)
        self.state = LinkState.UP if up else LinkState.CONNECTING
        """Changed by ``_move`` only."""
        self.epoch: int | None = None
        self.next_tick: float | None = None
        """The time of the next heartbeat; None while nothing depends on the peer."""
        self._last_epoch: int | None = None
        """The last that was heard, also before the link went down."""
        self._incarnations = Incarnations(_REMEMBERED_LINEAGES)
        self._connect_by: float | None = None
        self._heard = False
        self._missed = 0
        self._sent_before = 0
        """The id of the last request that was sent before the link went down."""
        self._pings_sent = 0  # and not answered: further PONGs are ignored
        self._serving_streams = 0
        self._highest: int | None = None
        self._gaps = IdGaps()
        self._expired = self._lost = self._duplicates = self._out_of_order = 0

    def need(self, now: float) -> None:
        """The peer is needed from now on: starts heartbeats, and a deadline for connecting if the link is not up."""
        if self.next_tick is None:
            self.next_tick = now + self.settings.heartbeat_s
            self._heard, self._missed = True, 0  # no sign of life has been asked for yet
        if self.state is not LinkState.UP and self._connect_by is None and not self.trusted:
            self._connect_by = now + self.settings.connect_timeout_s

    # ------------------------------------------------------------------ the peer's requests

    def admit_run(self, first: int, count: int) -> bool:
        """True if these requests follow the newest one without a gap, or are the first: all are delivered then. Else
        nothing is changed, and each needs ``admit``."""
        highest = self._highest
        if highest is None or first == highest + 1:
            self._highest = first + count - 1
            return True
        return False

    def admit(self, request_id: int) -> Admission:
        """Decides about one request that arrived. Takes note of it: to be called once for each."""
        highest = self._highest
        if highest is None or request_id == highest + 1:
            self._highest = request_id
            return _DELIVER
        if request_id > highest:
            self._gaps.add(highest + 1, request_id - 1)
            self._highest = request_id
            return _DELIVER
        if self._gaps.take(request_id):
            self._out_of_order += 1
            return Admission.OUT_OF_ORDER
        self._duplicates += 1
        return Admission.DUPLICATE

    def serve_stream(self, now: float) -> None:
        """A stream from here depends on its reader, the peer, from now on."""
        self._serving_streams += 1
        self.need(now)

    def end_stream(self) -> None:
        """Ends what ``serve_stream`` began."""
        self._serving_streams -= 1

    # ------------------------------------------------------------------ the link

    def _move(self, event: LinkEvent) -> None:
        allowed = TRANSITIONS[self.state]
        assert event in allowed, f"a link that is {self.state.value} can't be {event.value}"
        self.state = allowed[event]

    def connected(self) -> Effects[Waiter]:
        """The link came up, for the first time or again."""
        self._move(LinkEvent.CONNECTED)
        self._connect_by = None
        self._heard, self._missed = True, 0
        return Effects(withdraw=self._sent_before)

    def disconnected(self, reason: str) -> Effects[Waiter]:
        """The link went down. It may come up again, for new requests."""
        self._sent_before = self.requests.last_id
        self._move(LinkEvent.DISCONNECTED)
        self.epoch = None  # the next answer comes from a peer that was reached after this
        self._connect_by = None
        self._forget_received()
        return self.fail(reason)

    def _forget_received(self) -> None:
        self._highest = None
        self._gaps.clear()

    def is_over(self, epoch: int) -> bool:
        """True for an earlier incarnation of the peer, whose messages are ignored."""
        return self._incarnations.is_over(epoch)

    def heard(self, epoch: int) -> Effects[Waiter] | None:
        """A message arrived from the peer; effects if it comes from a new incarnation, else None."""
        self._heard = True
        if epoch == self.epoch:
            return None
        # ``epoch`` is forgotten when the link goes down, ``_last_epoch`` is not. The first answer after that may be a
        # new incarnation's and fails nothing: older requests have failed with the link, newer ones are for any
        # incarnation.
        previous, self.epoch = self.epoch, epoch
        last, self._last_epoch = self._last_epoch, epoch
        # Another process has taken the address.
        if last is not None and lineage_of(last) != lineage_of(epoch):
            self._incarnations.end(last)
        self._incarnations.heard(epoch)
        if previous is None:
            return None
        self._forget_received()
        effects = self.fail("its process was restarted")
        effects.withdraw = self.requests.last_id
        return effects

    def fail(self, reason: str) -> Effects[Waiter]:
        """Every request fails. ``reason``: the link went down, the peer refuses this side, there is no route to it."""
        effects: Effects[Waiter] = Effects(reason=reason, gone=True, waiting=self.requests.take_waiting())
        self._lose(list(self.requests), effects)
        self._lose_tells(effects, *self.requests.lose_tells())
        return effects

    def close(self, reason: str) -> Effects[Waiter]:
        """As ``fail``, for good: no request may follow. Can be repeated."""
        self._move(LinkEvent.CLOSED)
        self._connect_by = None
        return self.fail(reason)

    # ------------------------------------------------------------------ the time

    def wake_at(self) -> float | None:
        """The time of the next work for ``advance``, at the latest; None while nothing depends on the peer."""
        due = self.next_tick
        deadline = self.requests.next_deadline()
        if deadline is not None and (due is None or deadline < due):
            due = deadline
        if self._connect_by is not None and (due is None or self._connect_by < due):
            due = self._connect_by
        return due

    def advance(self, now: float, late_s: float = 0.0) -> Effects[Waiter]:
        """``late_s``: ``now`` is so much after the time of ``wake_at``."""
        # ``wake_at`` is never further ahead than a heartbeat: this side was stopped in between.
        if late_s > self.settings.heartbeat_s:
            self._put_off(late_s + self.settings.heartbeat_s)
        if self._connect_by is not None and self._connect_by <= now:
            self._connect_by = None
            timeout_s = self.settings.connect_timeout_s
            return self.fail(f"no connection within {timeout_s:g} s")
        effects: Effects[Waiter] = Effects(expired=self.requests.expire(now))
        self._expired += len(effects.expired)
        if self.next_tick is not None and self.next_tick <= now:
            effects = self._tick(now, effects)
        return effects

    def _put_off(self, seconds: float) -> None:
        self.requests.put_off(seconds)
        if self._connect_by is not None:
            self._connect_by += seconds

    def _tick(self, now: float, effects: Effects[Waiter]) -> Effects[Waiter]:
        if not (self.requests or self._serving_streams):
            self.next_tick = None
            return effects
        self.next_tick = now + self.settings.heartbeat_s
        if self.state is not LinkState.UP:
            return effects
        self._missed = 0 if self._heard or self.trusted else self._missed + 1
        self._heard = False
        if self._missed >= self.settings.ticks_of_silence:
            self._missed = 0
            reason = f"silent for over {self.settings.silence_s:g} s: it hangs, is stopped, or was cut off"
            failed = self.fail(reason)
            failed.expired, failed.silent = effects.expired, True
            effects = failed
        effects.ping = self.requests.last_id
        self._pings_sent += 1
        effects.cancel = [request.id for request in self.requests if request.abandoned]
        return effects

    def pong(self, last: int, serving: Iterable[int]) -> Effects[Waiter]:
        """Requests up to ``last`` that the peer is not serving have been answered, or lost."""
        if not self._pings_sent:
            return Effects()
        self._pings_sent -= 1
        effects: Effects[Waiter] = Effects(reason="the message, or its answer, was lost on the way")
        served = set(serving)
        missing = self.requests.missing(last, served)
        self._lose(missing, effects)
        self._lose_tells(effects, *self.requests.lose_tells(last, served))
        return effects

    # ------------------------------------------------------------------ losses

    def _lose(self, requests: list[Request[Waiter]], effects: Effects[Waiter]) -> None:
        effects.granted += self.requests.finish(request.id for request in requests)[1]
        effects.dead += [request for request in requests if not request.abandoned]
        self._lost += len(requests)

    def _lose_tells(self, effects: Effects[Waiter], count: int, granted: list[CreditWaiter]) -> None:
        effects.lost_tells += count
        effects.granted += granted
        self._lost += count

    def statistics(self) -> SessionStatistics:
        """The figures of this peer, for people and for the sums of the process."""
        requests = self.requests
        return SessionStatistics(
            requests=requests.last_id,
            in_flight=len(requests),
            waiting_for_credit=requests.waiting_for_credit(),
            expired=self._expired,
            late_replies=requests.late_replies,
            lost=self._lost,
            duplicates=self._duplicates,
            out_of_order=self._out_of_order,
        )
