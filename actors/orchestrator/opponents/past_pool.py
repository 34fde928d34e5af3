"""A pool of past versions of policies, as it plays against a policy in training. Pure: plain data and functions.

    member        weights of a policy as they were after some step, its Elo rating, and recent results against it
    payoffs       the pay-off matrix: a row for each version in training, by the newest member that it started from, a
                  column for each member, in each cell the games, and the sums of scores and rewards

A game is one trajectory. Its score is that of the policy in training: 1 if its reward is greater than the member's, 0
if it is less, 0.5 if they are equal. Members are named as in a config: ``player@20`` is ``player`` after step 20.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ...names import PolicyName, Step, Version

ELO_OF_THE_FIRST: Final = 1000.0
ELO_K: Final = 16.0
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


def member_name(policy: PolicyName, step: Step) -> str:
    """``policy`` as it was after ``step``."""
    return f"{policy}@{step}"


@dataclass(slots=True)
class Member:
    """The weights of ``policy`` after ``step``, its ``version`` then. ``games`` and ``score``: recent ones of the
    policy in training against it (``RECENT``)."""

    policy: PolicyName
    step: Step
    version: Version
    elo: float = ELO_OF_THE_FIRST
    games: float = 0.0
    score: float = 0.0

    @property
    def name(self) -> str:
        """As in a config."""
        return member_name(self.policy, self.step)

    @property
    def win_rate(self) -> float:
        """The share of the games that the policy in training has won, draws by half; 0.5 without a game."""
        return self.score / self.games if self.games else 0.5


@dataclass(slots=True)
class Payoff:
    """A cell of the pay-off matrix. ``row``, ``column``: names of members; of a policy that is not in the pool, ``row``
    has the step of the newest member. ``score``, ``reward``: sums, of the row; ``against``: of the column's rewards."""

    row: str
    column: str
    games: int = 0
    score: float = 0.0
    reward: float = 0.0
    against: float = 0.0


@dataclass(slots=True)
class PastPool:
    """``members``: the oldest first. ``member``: the name of the one that plays; ``version``: of the pool's policy, one
    more with each change of that member. ``elo``: of the policy in training."""

    members: list[Member] = field(default_factory=list)
    member: str = ""
    version: Version = _NO_VERSION
    elo: float = ELO_OF_THE_FIRST
    payoffs: list[Payoff] = field(default_factory=list)

    @property
    def playing(self) -> Member:
        """The member that plays the present step. Raises StopIteration before the first ``play``."""
        return next(member for member in self.members if member.name == self.member)

    def add(self, policy: PolicyName, step: Step, version: Version, size: int) -> bool:
        """Adds ``policy`` as it is after ``step``, with the rating that the policy in training has; beyond ``size``
        members the oldest leave, and their results. False if the policy's newest member has these weights."""
        newest = self.newest_of(policy)
        if newest is not None and newest.version == version:
            return False
        stay = max(0, len(self.members) + 1 - size)
        gone = {member.name for member in self.members[:stay]}
        self.members = [*self.members[stay:], Member(policy, step, version, self.elo)]
        self.payoffs = [payoff for payoff in self.payoffs if not {payoff.row, payoff.column} & gone]
        return True

    def newest_of(self, policy: PolicyName) -> Member | None:
        """The newest member that is a version of ``policy``."""
        return next((member for member in reversed(self.members) if member.policy == policy), None)

    def play(self, member: Member) -> bool:
        """``member`` plays from now on. True if it did not before: the pool has another version."""
        if member.name == self.member and self.version:
            return False
        self.version = Version(self.version + 1)
        self.member = member.name
        return True

    def row_of(self, trainee: PolicyName) -> str:
        """The row of the policy in training: its newest member, or, without one, that name with the newest step."""
        newest = self.newest_of(trainee)
        return member_name(trainee, self.members[-1].step) if newest is None else newest.name

    def played(self, games: Iterable[Game]) -> None:
        """Rates the policy in training by games against the member that plays, in their order: Elo's rule after each
        (A. Elo, The Rating of Chessplayers, 1978), with ``ELO_K``."""
        member = self.playing
        for game in games:
            expected = 1.0 / (1.0 + 10.0 ** ((member.elo - self.elo) / 400.0))
            change = ELO_K * (game.score - expected)
            self.elo += change
            member.elo -= change
            member.games = RECENT * member.games + 1.0
            member.score = RECENT * member.score + game.score

    def count(self, games: Iterable[Game], trainee: PolicyName) -> None:
        """Adds the pay-offs of games of ``trainee`` against the member that plays."""
        row = self.row_of(trainee)
        for game in games:
            cell = self._cell(row, self.member)
            cell.games += 1
            cell.score += game.score
            cell.reward += game.reward
            cell.against += game.against

    def _cell(self, row: str, column: str) -> Payoff:
        for payoff in self.payoffs:
            if (payoff.row, payoff.column) == (row, column):
                return payoff
        self.payoffs.append(Payoff(row, column))
        return self.payoffs[-1]
