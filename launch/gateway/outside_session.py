"""A session that a service has opened, from the request to its end, as the run's gateway knows it.

opening ─┬─> open ─┬─> ending ─┬─> rewarded    its rewards are trained
         │         │           ├─> late        they came too late for every step
         │         │           └─> closed      it has none
         │         └─> expired, lost, failed   the same
         └─> refused     no worker has begun it
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ...actors.messages import CarrierApi, QueryAnswer, SessionTerms
from ...core.ref import ActorRef

State = Literal[
    "opening", "open", "ending", "rewarded", "late", "closed", "expired", "failed", "lost", "refused"
]
_UNENDED: Final[tuple[State, ...]] = ("opening", "open", "ending")
_FATES: Final[tuple[State, ...]] = ("closed", "expired", "lost")


@dataclass(slots=True)
class OutsideSession:
    """``name``: its id. ``key``: of the program's requests, once it is open. ``expires``: seconds since the epoch.
    ``reason``: of its end, for people. ``has_late_rewards``: they are counted."""

    name: str
    terms: SessionTerms
    state: State = "opening"
    worker: ActorRef[CarrierApi] | None = None
    key: str = field(default="", repr=False)
    expires: float = 0.0
    reason: str = ""
    has_late_rewards: bool = False
    opened: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    task: "asyncio.Task[None] | None" = None
    """Waits for its end."""

    def begin(self, worker: ActorRef[CarrierApi]) -> SessionTerms | None:
        """A worker has got it; None if it may not begin."""
        if self.state != "opening" or self.worker is not None:
            self.lose()
            return None
        self.worker = worker
        return self.terms

    def open(self, key: str) -> bool:
        """It can be asked. False if it is no longer wanted."""
        if self.state != "opening":
            return False
        self.state, self.key = "open", key
        self.expires = time.time() + self.terms.lives_s
        self.opened.set_result(None)
        return True

    def settle(self) -> None:
        """Its worker has taken its rewards, or its end without any."""
        if self.state == "open":
            self.state = "ending"

    def lose(self) -> None:
        """No other worker has its conversation."""
        self.end("lost", "its rollout worker was lost")

    def answer(self, answer: QueryAnswer) -> None:
        """Its trajectory has ended."""
        fate, _, problem = answer.dropped.partition(": ")
        if not answer.dropped:
            self.end("rewarded", "its rewards are trained")
        elif (state := next((state for state in _FATES if state == fate), None)) is not None:
            self.end(state, problem)
        elif answer.failures:
            self.end("failed", answer.dropped)
        else:
            self.end("late", answer.dropped)

    def end(self, state: State, reason: str) -> None:
        """The first end counts."""
        if not self.has_ended:
            self.state, self.reason = state, reason

    @property
    def has_ended(self) -> bool:
        """True once its fate is known."""
        return self.state not in _UNENDED

    def for_service(self) -> dict[str, Any]:
        """Its state, for the one that has opened it."""
        return {"id": self.name, "state": self.state, "expires": self.expires, "reason": self.reason}
