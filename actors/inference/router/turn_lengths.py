"""Predictions of the length of a turn, learned from the turns that have ended. Pure.

A prediction decides two things in the router: the load that a turn is expected to be, and by how much it goes before
shorter ones that wait with it: the longest first, as in list scheduling (Graham, SIAM J. Appl. Math. 17, 1969).
StreamRL (arXiv 2504.15930, skewness-aware dispatching) predicts with a small model that ranks prompts; here the turns
that the same agent generated for the same query predict, in this step and in earlier ones.
"""

from collections import OrderedDict
from typing import Final, Literal, Protocol

from ...rolling_mean import RollingMean

Lengths = Literal["mean", "query"]
"""The names of the predictors, in the config."""

_REMEMBERED: Final = 16_384
_PRIOR: Final = 1.0
_MOST: Final = 16.0


class TurnLengths(Protocol):
    """Predicts the generated tokens of one policy's turns. ``topic``: names the agent and the query of a turn."""

    mean: RollingMean
    """Follows the lengths of all turns."""

    def expected(self, topic: str) -> float:
        """Returns the tokens that a turn is expected to generate; 0 before the first turn has ended."""
        ...

    def ended(self, topic: str, tokens: int) -> None:
        """Learns from a turn, or a part of one, with at least one token."""
        ...


class MeanLengths:
    """Predicts the mean of all turns: no turn goes before another one for its length."""

    def __init__(self) -> None:
        self.mean = RollingMean()

    def expected(self, topic: str) -> float:
        return self.mean.value

    def ended(self, topic: str, tokens: int) -> None:
        self.mean.add(tokens)


class QueryLengths:
    """Predicts the mean of the topic's turns, to which the mean ``m`` of all counts as one more:
    ``(m + sum of weights x tokens) / (1 + sum of weights)``. The weights are 1 for the first 16 turns of a topic; then
    they shrink, so that their sum stays 16, as the policy changes. Remembers the last 16,384 topics."""

    def __init__(self) -> None:
        self.mean = RollingMean()
        self._topics: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def expected(self, topic: str) -> float:
        weight, total = self._topics.get(topic, (0.0, 0.0))
        return (_PRIOR * self.mean.value + total) / (_PRIOR + weight)

    def ended(self, topic: str, tokens: int) -> None:
        self.mean.add(tokens)
        weight, total = self._topics.pop(topic, (0.0, 0.0))
        kept = min(1.0, (_MOST - 1.0) / weight) if weight else 1.0
        self._topics[topic] = (kept * weight + 1.0, kept * total + tokens)
        if len(self._topics) > _REMEMBERED:
            self._topics.popitem(last=False)


LENGTHS: Final[dict[Lengths, type[MeanLengths] | type[QueryLengths]]] = {
    "mean": MeanLengths,
    "query": QueryLengths,
}
"""The predictors by name."""
