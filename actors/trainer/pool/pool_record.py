"""The figures of a shared pool: of one policy, from optimizer step to optimizer step, and the times of its moves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from ...figures import Numbers
from .gangs import GangSeconds


@dataclass(slots=True)
class PoolRecord:
    """``moved_bytes``: of states between slots and the host's memory. ``repeated``: micro-batches that were trained
    again. ``gather_s``: of the new weights. All since the figures were taken last."""

    suspensions: int = 0
    moved_bytes: int = 0
    repeated: int = 0
    gather_s: float = 0.0
    _before: GangSeconds = field(default_factory=GangSeconds)

    def take(self, seconds: GangSeconds) -> Numbers:
        """The figures since the last call. ``seconds``: the policy's, from the beginning."""
        before, now = asdict(self._before), asdict(seconds)
        spent = {name: now[name] - before[name] for name in now}
        figures: Numbers = {
            "pool_computing_s": spent["computing"],
            "pool_slots_s": spent["computing_on_slots"],
            "pool_idle_s": spent["idle"],
            "pool_swapping_s": spent["swapping"],
            "pool_waiting_s": spent["waiting"],
            "pool_suspended_s": spent["out"],
            "suspensions": self.suspensions,
            "swapped_mib": self.moved_bytes / 2**20,
            "repeated_micro_batches": self.repeated,
            "gather_s": self.gather_s,
        }
        self.suspensions = self.moved_bytes = self.repeated = 0
        self.gather_s = 0.0
        self._before = replace(seconds)
        return figures


class MoveTimes:
    """The times in which states of policies move to slots or from them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._moving = 0
        self._since = 0.0
        """The begin of the moves under way, as far as they have not been taken."""
        self._ended: list[tuple[float, float]] = []

    @contextmanager
    def move(self) -> Iterator[None]:
        """A state moves."""
        if not self._moving:
            self._since = self._clock()
        self._moving += 1
        try:
            yield
        finally:
            self._moving -= 1
            if not self._moving:
                self._ended.append((self._since, self._clock()))

    def take(self) -> list[tuple[float, float]]:
        """The begin and the end of each since the last call, in seconds before now. One that lasts is cut here."""
        now = self._clock()
        if self._moving:
            self._ended.append((self._since, now))
            self._since = now
        ended, self._ended = self._ended, []
        return [(now - begin, now - end) for begin, end in ended]
