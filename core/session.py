"""The calls this system has in flight. Sans-I/O: ids and the time in, decisions out.

Rules:
- a call id is never used again within a system;
- every call has a deadline; ``expire`` hands each expired call out exactly once;
- a reply to a call that is no longer open (late, cancelled, unknown) is dropped and counted.
"""

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

Token = TypeVar("Token")


@dataclass(frozen=True, slots=True)
class OpenCall(Generic[Token]):
    """A call waiting for its reply. ``token`` is the caller's own (a future, say)."""

    call_id: int
    address: str
    actor: str
    endpoint: str
    timeout_s: float
    token: Token


@dataclass(slots=True)
class SessionStatistics:
    calls: int = 0
    expired: int = 0
    late_replies: int = 0
    in_flight: int = 0


class Session(Generic[Token]):
    def __init__(self) -> None:
        self._next_id = 0
        self._open: dict[int, OpenCall[Token]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._expired = 0
        self._late = 0

    def open(
        self, now: float, address: str, actor: str, endpoint: str, timeout_s: float, token: Token
    ) -> int:
        self._next_id += 1
        call_id = self._next_id
        self._open[call_id] = OpenCall(call_id, address, actor, endpoint, timeout_s, token)
        heapq.heappush(self._deadlines, (now + timeout_s, call_id))
        return call_id

    def close(self, call_id: int) -> OpenCall[Token] | None:
        """Ends a call because its reply is here; None where no such call is open."""
        call = self._open.pop(call_id, None)
        if call is None:
            self._late += 1
        return call

    def cancel(self, call_id: int) -> OpenCall[Token] | None:
        """Ends a call because its caller gave up; None where it has ended already."""
        return self._open.pop(call_id, None)

    def expire(self, now: float) -> list[OpenCall[Token]]:
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            call = self._open.pop(heapq.heappop(self._deadlines)[1], None)
            if call is not None:
                expired.append(call)
        self._expired += len(expired)
        return expired

    def next_deadline(self) -> float | None:
        """When ``expire`` has work next. Ended calls are forgotten here, so that the heap stays small."""
        while self._deadlines and self._deadlines[0][1] not in self._open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def fail(self, address: str | None = None) -> list[OpenCall[Token]]:
        """Ends and returns all calls to ``address`` (every call, where it is None)."""
        failed = [call for call in self._open.values() if address in (None, call.address)]
        for call in failed:
            del self._open[call.call_id]
        return failed

    def statistics(self) -> SessionStatistics:
        return SessionStatistics(self._next_id, self._expired, self._late, len(self._open))
