"""The figures of one process, as plain data: read once a step, and summed over its mailboxes and peers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..delivery.mailbox import MailboxStatistics
from ..protocol.session import SessionStatistics
from ..telemetry import ProcessUsage


@dataclass(frozen=True, slots=True)
class PeerTotals:
    """Sums over the peers of a process. ``open_calls``: requests without a reply yet. ``credit_waits``: calls that wait
    for credit now. ``sent_requests``, ``expired_calls`` (deadline passed), ``lost_requests`` (message or reply lost)
    and ``refused_messages`` (could not be decoded) are counts since the start."""

    peers: int = 0
    open_calls: int = 0
    credit_waits: int = 0
    sent_requests: int = 0
    expired_calls: int = 0
    lost_requests: int = 0
    refused_messages: int = 0


NO_MAILBOXES = MailboxStatistics(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ProcessStatistics(ProcessUsage):
    """``mailboxes`` and ``peers`` are sums. ``actors``: ``Actor.statistics`` by the name of the actor, of those actors
    that have any. ``progress``: the sum of ``Actor.progress``."""

    mailboxes: MailboxStatistics = NO_MAILBOXES
    peers: PeerTotals = PeerTotals()
    actors: dict[str, dict[str, float]] = field(default_factory=dict)
    progress: int = 0


def sum_of_mailboxes(mailboxes: Iterable[MailboxStatistics]) -> MailboxStatistics:
    """The sums of all counts."""
    totals = [0, 0, 0, 0, 0]
    for mailbox in mailboxes:
        for index, count in enumerate(
            (mailbox.waiting, mailbox.running, mailbox.served, mailbox.failed, mailbox.cancelled)
        ):
            totals[index] += count
    return MailboxStatistics(*totals)


def sum_of_peers(sessions: Sequence[SessionStatistics], refused_messages: int) -> PeerTotals:
    """The sums over the sessions with all peers. ``refused_messages``: of the whole process."""
    return PeerTotals(
        peers=len(sessions),
        open_calls=sum(session.in_flight for session in sessions),
        credit_waits=sum(session.waiting_for_credit for session in sessions),
        sent_requests=sum(session.requests for session in sessions),
        expired_calls=sum(session.expired for session in sessions),
        lost_requests=sum(session.lost for session in sessions),
        refused_messages=refused_messages,
    )
