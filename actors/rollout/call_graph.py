"""The work that is expected to wait for a turn, learned from trajectories that have ended. Pure.

    planner ──> solver ──> checker        behind the planner's turn: the longest chain of turns that began after its end
            └─> solver ──> checker

The router prefers turns with more behind them (critical path first), so that trajectories end sooner.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..names import AgentName

_WINDOW: Final = 64
_LAST: Final = 31
"""Later turns of an agent in its trajectory count as this one."""


@dataclass(frozen=True, slots=True)
class TimedTurn:
    """A turn of a trajectory that has ended. ``tokens``: generated."""

    agent: AgentName
    began_s: float
    ended_s: float
    tokens: int


class CallGraph:
    """By agent and number of its turn in the trajectory: the mean number of tokens behind it, over the last 64 or
    so."""

    def __init__(self) -> None:
        self._behind: dict[tuple[AgentName, int], tuple[int, float]] = {}

    def downstream_tokens(self, agent: AgentName, number: int) -> float:
        """Expected tokens of the longest chain of turns behind the agent's turn ``number`` (from 0); 0 if unknown."""
        return self._behind.get((agent, min(number, _LAST)), (0, 0.0))[1]

    def ended(self, turns: Sequence[TimedTurn]) -> None:
        """Learns from the turns of one trajectory."""
        numbers: dict[AgentName, int] = {}
        for turn, behind in sorted(
            zip(turns, chains_behind(turns), strict=True), key=lambda pair: pair[0].began_s
        ):
            number = numbers.get(turn.agent, 0)
            numbers[turn.agent] = number + 1
            key = (turn.agent, min(number, _LAST))
            count, mean = self._behind.get(key, (0, 0.0))
            count = min(count + 1, _WINDOW)
            self._behind[key] = (count, mean + (behind - mean) / count)


def chains_behind(turns: Sequence[TimedTurn]) -> list[int]:
    """For each turn the tokens of the longest chain of turns, each of which began after the end of the one before."""
    order = sorted(range(len(turns)), key=lambda n: turns[n].began_s)
    begins = [turns[n].began_s for n in order]
    behind = [0] * len(turns)
    longest = [0] * (len(turns) + 1)
    """The longest chain of the turns from each position of ``order`` on."""
    for position in range(len(turns) - 1, -1, -1):
        turn = turns[order[position]]
        behind[order[position]] = longest[max(position + 1, bisect_left(begins, turn.ended_s))]
        longest[position] = max(longest[position + 1], turn.tokens + behind[order[position]])
    return behind
