"""Rules of patches: the departures from a demonstration that its own action replaces.

    an agent's turn ─> agrees with the demonstration ─────────────> the environment takes the turn
                  └──> departs ─> patches(departure) ─┬─ True ────> the environment takes the recorded action
                                                      └─ False ───> the trajectory ends

A rule is one file beside this one, with one class, and one row of ``demonstration_config.py``. A rule is pure: a
trajectory that begins again after a loss has the same patches, and no rule has a state to be saved.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..config_base import Config, Share


@dataclass(frozen=True, slots=True)
class Departure:
    """A turn whose action is not the recorded one. ``patches``: of earlier turns in its trajectory. ``draw``: a number
    of [0, 1) that follows from the turn's id, evenly distributed over turns."""

    patches: int
    draw: float


class PatchRule(Config):
    """A rule with its settings; the key ``patch`` chooses the class."""

    file: str
    """File of the [demonstrations](environments.md#demonstrations), one a line, in the recipe's folder or the working
    directory."""
    decay: Share = 0.5
    """Weight of an agent's next turn in the return of a turn that agrees (UI-S1: 0.5)."""

    def patches(self, departure: Departure) -> bool:
        """Returns True if the recorded action takes the place of the turn, and False if the trajectory ends there."""
        raise NotImplementedError


def match_returns(matches: Sequence[bool], decay: float) -> list[float]:
    """Returns the return of each of an agent's turns, in [0, 1 / (1 - decay)): that of a turn which agrees is 1 plus
    ``decay`` times that of the next one, and that of a departure is 0 (UI-S1, arXiv 2509.11543: discounted future
    returns, broken off at a departure). ``matches``: in the order of its turns, True for a turn that agrees."""
    returns: list[float] = []
    following = 0.0
    for agrees in reversed(matches):
        following = 1.0 + decay * following if agrees else 0.0
        returns.append(following)
    return returns[::-1]
