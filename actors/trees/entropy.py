"""The rule of ECHO: width by entropy and confidence, and an early end of lines that stay unsure."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, ClassVar, Literal

from ..config_base import Count, Positive, Share, Unit
from .branch_rule import BranchRule, Candidate


class EntropyRule(BranchRule):
    """Branches where the policy is unsure, less on a line that was unsure for long, and cuts such lines (ECHO,
    arXiv 2602.02150: width by local entropy and group-level confidence, pruning of persistently low confidence).

        width = 1 + round((most - 1) min(1, h / entropy) c)

    ``h`` is the surprise of the first candidate, ``c`` the mean confidence of the line's last ``tail`` rounds (1 at its
    begin), ``most`` the lesser of ``width`` and the lines that ``lines`` leaves. Assumed, as only the abstract and
    reviews were found: the form of the product, the draw's surprise in place of the entropy of the whole distribution,
    rounds in place of windows of tokens, and the numbers."""

    compares_rewards: ClassVar[bool] = False

    branch: Literal["entropy"] = "entropy"
    """Rule of the branches."""
    lines: Annotated[Count, Unit("lines")] = 8
    """Most lines of a tree."""
    entropy: Annotated[Positive, Unit("nats")] = 1.0
    """Surprise of the first candidate, as a mean over its tokens, from which a branch point has its full width."""
    tail: Annotated[Count, Unit("rounds")] = 2
    """Last rounds of a line whose confidence counts."""
    least_confidence: Share = 0.05
    """A line whose last `patience` rounds are all less confident than this is cut, unless no other one of its branch
    point stays. 0: no line is cut."""
    patience: Annotated[Count, Unit("rounds")] = 2
    """Rounds that a line may be less confident."""

    @property
    def most_lines(self) -> int:
        return self.lines

    def count(self, first: Candidate, most: int) -> int:
        certainty = fmean(first.past[-self.tail :]) if first.past else 1.0
        return 1 + math.floor((most - 1) * min(1.0, first.surprise / self.entropy) * certainty + 0.5)

    def kept(self, candidates: Sequence[Candidate]) -> list[int]:
        unsure = [
            len(confidences) == self.patience and max(confidences) < self.least_confidence
            for confidences in ((*c.past, c.confidence)[-self.patience :] for c in candidates)
        ]
        stay = [place for place, low in enumerate(unsure) if not low]
        if stay:
            return stay
        most = max(candidates, key=lambda candidate: candidate.confidence)
        return [candidates.index(most)]
