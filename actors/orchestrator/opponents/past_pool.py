"""A pool of past versions of a policy, as it plays against the policy in training. Pure: plain data and functions.

    member        weights of the policy as they were after some step, its Elo rating, and recent results against it
    payoffs       the pay-off matrix: a row for each version in training, by the newest member that it started from, a
                  column for each member, in each cell the games, and the sums of scores and rewards

A game is one trajectory. Its score is that of the policy in training: 1 if its reward is greater than the member's, 0
if it is less, 0.5 if they are equal.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ...names import Step, Version

ELO_OF_THE_FIRST: Final = 1000.0
ELO_K: Final = 16.0
_NO_STEP: Final = Step(0)
_NO_VERSION: Final = Version(0)
RECENT: Final = 0.99
"""An earlier game counts so much less with each later one in win rates (AlphaStar, Vinyals et al. 2019, pseudocode)."""


@dataclass(frozen=True, slots=True)
class Game:
    """One trajectory. ``reward``: of the policy in training, the mean over its agents; ``against``: of the member."""

    reward: float
    against: float

    @property
    def score(self) -> float:
        """The score of the policy in training: 1, 0.5 or 0."""
        return 0.5 * ((self.reward > self.against) + (self.reward >= self.against))


@dataclass(slots=True)
class Member:
    """The policy's weights after ``step``, its ``version`` then. ``games`` and ``score``: recent ones of the policy in
    training against it (``RECENT``)."""

    step: Step
    version: Version
    elo: float = ELO_OF_THE_FIRST
    games: float = 0.0
    score: float = 0.0

    @property
    def win_rate(self) -> float:
        """The share of the games that the policy in training has won, draws by half; 0.5 without a game."""
        return self.score / self.games if self.games else 0.5


@dataclass(slots=True)
class Payoff:
    """A cell of the pay-off matrix. ``row``, ``column``: steps of members. ``score`` and ``reward``: sums."""

    row: Step
    column: Step
    games: int = 0
    score: float = 0.0
    reward: float = 0.0


@dataclass(slots=True)
class PastPool:
    """``members``: the oldest first. ``member``: the step of the one that plays; ``version``: of the pool's policy, one
    more with each change of that member. ``elo``: of the policy in training."""

    members: list[Member] = field(default_factory=list)
    member: Step = _NO_STEP
    version: Version = _NO_VERSION
    elo: float = ELO_OF_THE_FIRST
    payoffs: list[Payoff] = field(default_factory=list)

    @property
    def playing(self) -> Member:
        """The member that plays the present step. Raises StopIteration before the first ``play``."""
        return next(member for member in self.members if member.step == self.member)

    def add(self, step: Step, version: Version, size: int) -> bool:
        """Adds the policy after ``step``, with the rating that it has in training; beyond ``size`` members the oldest
        leave, and their results. False if the newest member has these weights."""
        if self.members and self.members[-1].version == version:
            return False
        self.members = [
            *self.members[max(0, len(self.members) + 1 - size) :],
            Member(step, version, self.elo),
        ]
        steps = {member.step for member in self.members}
        self.payoffs = [payoff for payoff in self.payoffs if {payoff.row, payoff.column} <= steps]
        return True

    def play(self, member: Member) -> bool:
        """``member`` plays from now on. True if it did not before: the pool has another version."""
        if member.step == self.member and self.version:
            return False
        self.version = Version(self.version + 1)
        self.member = member.step
        return True

    def played(self, games: Iterable[Game]) -> None:
        """Adds the results of games against the member that plays, in their order: Elo's rule after each (A. Elo, The
        Rating of Chessplayers, 1978), with ``ELO_K``."""
        member = self.playing
        for game in games:
            cell = self._cell(self.members[-1].step, member.step)
            expected = 1.0 / (1.0 + 10.0 ** ((member.elo - self.elo) / 400.0))
            change = ELO_K * (game.score - expected)
            self.elo += change
            member.elo -= change
            member.games = RECENT * member.games + 1.0
            member.score = RECENT * member.score + game.score
            cell.games += 1
            cell.score += game.score
            cell.reward += game.reward

    def _cell(self, row: Step, column: Step) -> Payoff:
        for payoff in self.payoffs:
            if (payoff.row, payoff.column) == (row, column):
                return payoff
        self.payoffs.append(Payoff(row, column))
        return self.payoffs[-1]
