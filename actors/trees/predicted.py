"""The rule of TRACE: branches where the predicted success promises different ends."""

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from ..config_base import Count, Positive, Share, Unit
from ..workflow import Rewards
from .branch_rule import BranchRule, Candidate


class PredictedRule(BranchRule):
    """A prefix gets candidates while the next one raises the chance of different ends by ``gain`` or more (TRACE, Zou
    et al., arXiv 2606.11119: the budget goes to prompts and prefixes that are most likely to have mixed outcomes, by a
    predictor of success from prefixes that the run shares).

        mixed(m) = 1 - p ** m - (1 - p) ** m        of m candidates, p the predicted success of the prefix

    The tree has at most ``lines`` lines. All stay. With ``mean_lines`` the threshold is ``gain`` times a price that all
    trees of a step share, and that rises after a step with more lines: the candidates that add most under a budget of
    all prompts and prefixes are those above one threshold, its Lagrange multiplier. Assumed, as only the abstract was
    found: the predictor (``SuccessModel``: the paper's is a shared one too), the form of the threshold and of the
    budget, and branches on the way, a round after the other, where the paper may return to a prefix of a line that has
    ended."""

    compares_rewards: ClassVar[bool] = False
    predicts: ClassVar[bool] = True

    branch: Literal["predicted"] = "predicted"
    """Rule of the branches."""
    lines: Annotated[Count, Unit("lines")] = 8
    """Most lines of a tree."""
    gain: Share = 0.2
    """Least chance of different ends that a candidate adds."""
    mean_lines: Annotated[Positive, Unit("lines")] | None = None
    """Budget: lines of a tree, as the mean over all trees of a step. `gain` is then the threshold of the first step,
    and that of later ones follows. `null`: `gain` stays."""
    success: str = "accuracy"
    """Metric of the workflow that is at least 1 for a success. Without it, the mean reward of the line's agents, or of
    its turns, between 0 and 1."""

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.mean_lines is not None and not 1.0 <= self.mean_lines <= self.lines:
            raise ValueError(f"mean_lines={self.mean_lines:g} is not from 1 to lines={self.lines}")
        if self.mean_lines is not None and self.gain == 0.0:
            raise ValueError("gain=0 has no threshold that mean_lines can raise: give more, as 0.2")
        return self

    @property
    def most_lines(self) -> int:
        return self.lines

    def count(self, first: Candidate, most: int) -> int:
        count, least = 1, self.gain * first.price
        while count < most and added_contrast(first.success, count) >= least:
            count += 1
        return count

    def kept(self, candidates: Sequence[Candidate]) -> list[int]:
        return [*range(len(candidates))]

    def excess(self, lines: int) -> float | None:
        return None if self.mean_lines is None else lines / self.mean_lines - 1.0

    def success_of(self, rewards: Rewards) -> float:
        if (metric := rewards.metrics.get(self.success)) is not None:
            return float(metric >= 1.0)
        of_turns = [amount for _, amount in rewards.turns]
        amounts = [*rewards.by_agent.values()] or of_turns or [rewards.team or 0.0]
        return min(1.0, max(0.0, fmean(amounts)))


def added_contrast(chance: float, count: int) -> float:
    """Returns ``mixed(count + 1) - mixed(count)``: the chance that ``count`` ends are equal and the next one is not."""
    failure = 1.0 - chance
    return chance**count * failure + failure**count * chance
