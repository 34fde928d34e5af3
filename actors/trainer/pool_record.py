"""The figures of one policy in a shared pool, from optimizer step to optimizer step. Pure."""

from dataclasses import asdict, dataclass, field, replace

from ..messages import PoolFigures
from .gangs import GangSeconds


@dataclass(slots=True)
class PoolRecord:
    """``suspensions``, ``moved_bytes``, ``repeated``: see ``PoolFigures``; since the figures were taken last."""

    suspensions: int = 0
    moved_bytes: int = 0
    repeated: int = 0
    _before: GangSeconds = field(default_factory=GangSeconds)

    def take(self, seconds: GangSeconds) -> PoolFigures:
        """The figures since the last call. ``seconds``: the policy's, from the beginning."""
        before, now = asdict(self._before), asdict(seconds)
        spent = {name: now[name] - before[name] for name in now}
        figures = PoolFigures(
            computing_s=spent["computing"],
            idle_s=spent["idle"],
            swapping_s=spent["swapping"],
            waiting_s=spent["waiting"],
            suspended_s=spent["out"],
            suspensions=self.suspensions,
            moved_bytes=self.moved_bytes,
            repeated=self.repeated,
        )
        self.suspensions = self.moved_bytes = self.repeated = 0
        self._before = replace(seconds)
        return figures
