"""The figures of one policy in a shared pool, from optimizer step to optimizer step. Pure."""

from dataclasses import asdict, dataclass, field, replace

from ...figures import Numbers
from .gangs import GangSeconds


@dataclass(slots=True)
class PoolRecord:
    """``moved_bytes``: of states between slots and the host's memory. ``repeated``: micro-batches that were trained
    again. All since the figures were taken last."""

    suspensions: int = 0
    moved_bytes: int = 0
    repeated: int = 0
    _before: GangSeconds = field(default_factory=GangSeconds)

    def take(self, seconds: GangSeconds) -> Numbers:
        """The figures since the last call. ``seconds``: the policy's, from the beginning."""
        before, now = asdict(self._before), asdict(seconds)
        spent = {name: now[name] - before[name] for name in now}
        figures: Numbers = {
            "pool_computing_s": spent["computing"],
            "pool_idle_s": spent["idle"],
            "pool_swapping_s": spent["swapping"],
            "pool_waiting_s": spent["waiting"],
            "pool_suspended_s": spent["out"],
            "suspensions": self.suspensions,
            "swapped_mib": self.moved_bytes / 2**20,
            "repeated_micro_batches": self.repeated,
        }
        self.suspensions = self.moved_bytes = self.repeated = 0
        self._before = replace(seconds)
        return figures
