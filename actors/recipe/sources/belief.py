"""The chance that a trajectory solves a query, as it is known from the query's groups. Pure.

A chance is a Beta distribution. Its parameters are 1 and 1 at first, which is uniform, and grow with the trajectories
of the query's groups that solved it, and that failed. The policy learns, so that a group says less the older it is. The
evidence of a query fades twice: by ``decay`` when a newer group of the query ends, and by ``drift`` with each step.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Belief:
    """``solved``, ``failed``: the sums of the trajectories' weights as they are at ``step``. ``groups``: the
    number of the groups."""

    solved: float = 0.0
    failed: float = 0.0
    step: int = 0
    groups: int = 0

    def at(self, step: int, drift: float) -> "Belief":
        """The same when ``step`` has come."""
        if step <= self.step:  # under async a group may end in the order of its query, behind younger ones
            return self
        weight = drift ** (step - self.step)
        return replace(self, solved=self.solved * weight, failed=self.failed * weight, step=step)

    def after(self, share: float, trajectories: int, step: int, *, decay: float, drift: float) -> "Belief":
        """The same after a group of ``step``, of whose ``trajectories`` this ``share`` has solved the query."""
        faded = self.at(step, drift)
        return Belief(
            decay * faded.solved + share * trajectories,
            decay * faded.failed + (1.0 - share) * trajectories,
            faded.step,
            self.groups + 1,
        )

    @property
    def mean(self) -> float:
        """The expected chance; 0.5 if nothing is known."""
        return (1.0 + self.solved) / (2.0 + self.solved + self.failed)
