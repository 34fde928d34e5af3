"""The links between rollout workers and instances that are cut while the router reaches both ends. Pure.

    lost ──> REPORTED ──answered──> DOUBTED ──lost──> CUT ──its time has come──> DUE ──routed──> TRIED ──lost──> CUT
                                       └────────────── a turn ends well ──> forgotten ─────────────┘

An instance at which a worker has lost a turn may be dead: the router probes it. If it answers, and the worker loses
another turn there before one ends well, then the link is at fault: the worker's turns go elsewhere, and the instance
stays what it is for all other workers. One turn at a time tries a link that is cut, after a pause that doubles.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from .waiting_turns import RoutedInstance

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


class LinkState(Enum):
    REPORTED = auto()
    """A turn was lost; the instance may be dead."""
    DOUBTED = auto()
    """The instance has answered the router since."""
    CUT = auto()
    DUE = auto()
    """The next turn tries it."""
    TRIED = auto()
    """A turn is on its way."""


_CLOSED: Final = frozenset({LinkState.CUT, LinkState.TRIED})
_AT_FAULT: Final = frozenset({LinkState.CUT, LinkState.DUE, LinkState.TRIED})


@dataclass(slots=True)
class CutLink:
    """``session``: of the worker. ``instance``: its first number. ``since_s``: the first of its lost turns.
    ``retry_s``: the time of the next try, if it is cut. ``trial``: the number of the turn that tries it."""

    session: int
    instance: int
    since_s: float
    state: LinkState = LinkState.REPORTED
    pause_s: float = _FIRST_PAUSE_S / 2
    retry_s: float = math.inf
    trial: int = 0


class CutLinks:
    """Instances are given by their first numbers. Links without lost turns are unknown, and open."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], CutLink] = {}
        self._workers: dict[int, str] = {}
        """The names of the rollout workers, by session."""

    def begin(self, session: int, worker: str) -> None:
        """A session begins. ``worker``: its rollout actor's name, for people."""
        self._workers[session] = worker

    def lost(self, session: int, instance: int, turn: int, now: float) -> CutLink | None:
        """A turn was lost. Returns the link if that is at fault, and None if the instance may be."""
        link = self._links.setdefault((session, instance), CutLink(session, instance, now))
        if link.state is LinkState.REPORTED:
            return None
        if link.state is LinkState.DOUBTED or (link.state is LinkState.TRIED and link.trial == turn):
            link.state = LinkState.CUT
            link.pause_s = min(2 * link.pause_s, _LONGEST_PAUSE_S)
            link.retry_s = now + link.pause_s
        return link  # else it is a turn from before the cut

    def ended(self, session: int, instance: int, turn: int, *, well: bool) -> None:
        """A turn has ended and was not lost. ``well``: the instance has answered it; else it was given up."""
        if (link := self._links.get((session, instance))) is None:
            return
        if well:
            del self._links[session, instance]
        elif link.state is LinkState.TRIED and link.trial == turn:
            link.state = LinkState.DUE

    def answered(self, instance: int) -> None:
        """An instance that may have been dead has answered the router."""
        for link in self._links.values():
            if link.instance == instance and link.state is LinkState.REPORTED:
                link.state = LinkState.DOUBTED

    def routed(self, session: int, instance: int, turn: int) -> None:
        """A turn goes to the instance."""
        link = self._links.get((session, instance))
        if link is not None and link.state is LinkState.DUE:
            link.state, link.trial = LinkState.TRIED, turn

    def expire(self, now: float) -> bool:
        """Lets the links be tried whose time has come. True if there are any."""
        due = [link for link in self._links.values() if link.state is LinkState.CUT and link.retry_s <= now]
        for link in due:
            link.state = LinkState.DUE
        return bool(due)

    def forget(self, *, session: int | None = None, instance: int | None = None) -> None:
        """The worker's session has ended, or the instance is gone."""
        if session is not None:
            self._workers.pop(session, None)
        for key, link in list(self._links.items()):
            if session == link.session or instance == link.instance:
                del self._links[key]

    @property
    def next_try_s(self) -> float:
        """The time at which ``expire`` is to be called; infinity without a cut link."""
        return min(
            (link.retry_s for link in self._links.values() if link.state is LinkState.CUT), default=math.inf
        )

    @property
    def any_at_fault(self) -> bool:
        """True if there are links of which turns have to know."""
        return bool(self._links) and any(link.state in _AT_FAULT for link in self._links.values())

    def is_open(self, session: int, instance: int) -> bool:
        """True if turns of the session may go to the instance now."""
        link = self._links.get((session, instance))
        return link is None or link.state not in _CLOSED

    def of(self, session: int, instance: int) -> CutLink | None:
        """The link if it is at fault."""
        link = self._links.get((session, instance))
        return link if link is not None and link.state in _AT_FAULT else None

    def all_closed(self, session: int, instances: Iterable[RoutedInstance]) -> bool:
        """True if turns of the session may go to none of the instances."""
        return not any(self.is_open(session, instance.load.numbers[0]) for instance in instances)

    def describe(self, session: int, instances: Iterable[RoutedInstance]) -> str:
        """The links of the session to ``instances`` that are at fault, as a sentence."""
        names = [instance.name for instance in instances if self.of(session, instance.load.numbers[0])]
        answer = "answers" if len(names) == 1 else "answer"
        return (
            f"{self.worker(session)} can't reach {', '.join(names)}, which {answer} the router: the link between "
            "their hosts is cut"
        )

    def worker(self, session: int) -> str:
        """The name of the session's rollout worker, for people."""
        return self._workers.get(session, "a rollout actor")

    def __iter__(self) -> Iterator[CutLink]:
        return iter(list(self._links.values()))
