"""Filter of the answers between the best and the worst of a group."""

from statistics import fmean
from typing import Annotated, ClassVar, Literal

from ..config_base import Count, Unit
from .group_filter import Exclusion, FilterOptions, FinishedGroup


class Contrast(FilterOptions):
    """Keeps, of each agent, the ``extremes`` trajectories of the group with the greatest advantages and as many with
    the least (the selection of Sol-RL, Li et al., arXiv 2604.06916: the best and the worst of many explored samples
    carry the gradient). A trajectory counts with the mean advantage of the agent's turns; of equal ones the first is
    kept.

    The other half of Sol-RL, exploration by a cheaper engine and the chosen samples once more at full precision, is
    ``rollout.explorations``: there the samples between the best and the worst are never generated at full precision.
    """

    compares: ClassVar[bool] = True

    name: Literal["contrast"] = "contrast"
    """Filter of a group's samples."""
    extremes: Annotated[Count, Unit("trajectories")] = 2
    """Trajectories that are kept at either end of a group."""

    def judge(self, group: FinishedGroup) -> Exclusion | None:
        samples: set[str] = set()
        for agent in dict.fromkeys(turn.agent for turn in group.turns):
            turns = [turn for turn in group.turns if turn.agent == agent]
            advantages: dict[int, list[float]] = {}
            for turn in turns:
                advantages.setdefault(turn.trajectory, []).append(turn.advantage)
            means = {trajectory: fmean(advantages[trajectory]) for trajectory in sorted(advantages)}
            best = sorted(means, key=lambda trajectory: -means[trajectory])[: self.extremes]
            worst = sorted(means, key=lambda trajectory: means[trajectory])[: self.extremes]
            samples |= {turn.sample_id for turn in turns if turn.trajectory not in {*best, *worst}}
        if not samples:
            return None
        return Exclusion(
            f"{len(samples)} turns are between the best and the worst {self.extremes}", frozenset(samples)
        )
