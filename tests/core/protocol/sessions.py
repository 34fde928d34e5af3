"""Sessions for tests, and callers that wait for their requests."""

import math
from typing import Any

from flexmarl.core.protocol.envelopes import Kind
from flexmarl.core.protocol.open_requests import Request
from flexmarl.core.protocol.session import Session, Settings

SMALL = Settings(
    heartbeat_s=1.0, missed_heartbeats=3, connect_timeout_s=2.0, window_requests=4, window_bytes=300
)
CALL, TELL, STREAM = Kind.CALL, Kind.TELL, Kind.STREAM


class Caller:
    """Waits for the end of one request, of which there must be one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ends: list[str] = []
        self.gave_up = False

    def done(self) -> bool:
        return self.gave_up or bool(self.ends)

    def end(self, how: str) -> None:
        assert not self.ends, f"{self.name} ends as {how} and ended as {self.ends}"
        if not self.gave_up:
            self.ends.append(how)


class Turn:
    """Waits for credit."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.gave_up = False

    def done(self) -> bool:
        return self.gave_up

    def set_exception(self, error: Exception, /) -> None:
        raise AssertionError("credit fails no waiter")


def ask(session: Session[Any], kind: Kind, now: float = 0.0, timeout_s: float = 60.0) -> Request[Any]:
    requests = session.requests
    callee = requests.callee(kind, "a", "endpoint", timeout_s)
    assert callee.credit.take(10)
    session.need(now)
    waiter = Caller(kind.name)
    if kind is TELL:
        return Request(requests.tell(callee.credit, 10), callee, waiter, 10)
    return requests.add(now + timeout_s if callee.is_call else math.inf, callee, waiter, 10)


def up() -> Session[Any]:
    session: Session[Any] = Session(Settings(heartbeat_s=1.0, missed_heartbeats=3, connect_timeout_s=2.0))
    session.connected()
    session.heard(1)
    return session
