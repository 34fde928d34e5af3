"""The game whose actions are the members of a pool, and a Nash equilibrium of it. Pure.

The pay-off matrix of a pool has the games of the policy in training, by the newest member that it started from. Each
pair of members is one cell here, with the games of both sides; the game is zero-sum and symmetric, as the value of a
cell is half of the difference of the two rewards.

Empirical games and their mixtures are those of policy-space response oracles (Lanctot et al., arXiv 1711.00832,
section 3): there every pair of members plays a number of games, as with ``matches`` here. Without, the games of
training are counted, which cost nothing: those of a version on its way from one member to the next count as games of
the first, so that newer members look stronger than they are. A pair that has never met counts as equal.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .past_pool import Member, Payoff

Matrix = NDArray[np.float64]
_GAP: Final = 1e-3
"""The search ends when no member wins more than this share of the greatest pay-off against the mixture."""
_MOST_ROUNDS: Final = 4000
_CHECKED_EVERY: Final = 50


def meta_game(members: Sequence[Member], payoffs: Sequence[Payoff]) -> Matrix:
    """``[n, n]``: the mean win of the row's member over the column's; antisymmetric, 0 without a game."""
    places = {member.name: number for number, member in enumerate(members)}
    wins, games = np.zeros((len(members), len(members))), np.zeros((len(members), len(members)))
    for cell in payoffs:
        row, column = places.get(cell.row), places.get(cell.column)
        if row is None or column is None or row == column:
            continue
        won = 0.5 * (cell.reward - cell.against)
        wins[row, column] += won
        wins[column, row] -= won
        games[row, column] += cell.games
        games[column, row] += cell.games
    return wins / np.maximum(games, 1.0)


def mixture(game: Matrix) -> list[float]:
    """A Nash equilibrium of a symmetric zero-sum game ``[n, n]``, n at least 1: a probability for each action.

    By predictive regret matching+ with quadratic averages (Farina et al., arXiv 2007.14358, section 5). It ends as soon
    as the mixture's gap is at most ``_GAP`` of the greatest pay-off, or after ``_MOST_ROUNDS`` rounds.
    """
    actions = len(game)
    average, present = np.full(actions, 1.0 / actions), np.full(actions, 1.0 / actions)
    bound = _GAP * float(np.abs(game).max())
    regrets, total = np.zeros(actions), np.zeros(actions)
    for number in range(1, _MOST_ROUNDS + 1):
        if number % _CHECKED_EVERY == 1 and gap(game, average) <= bound:
            break
        # Both sides play the same mixture, whose own pay-off is 0 in a symmetric game.
        wins = game @ present
        regrets = np.maximum(regrets + wins, 0.0)
        predicted = np.maximum(regrets + wins, 0.0)
        positive = float(predicted.sum())
        present = predicted / positive if positive > 0 else np.full(actions, 1.0 / actions)
        total += number**2 * present
        average = total / total.sum()
    return [float(share) for share in average]


def gap(game: Matrix, weights: Sequence[float] | Matrix) -> float:
    """The most that an action wins against a mixture: 0 in an equilibrium of a symmetric zero-sum game."""
    return float((game @ np.asarray(weights)).max())


def least_measured(members: Sequence[Member], payoffs: Sequence[Payoff], row: str) -> int:
    """The place of the member that ``row`` has met in the fewest games, in either seat of the matrix; the newest of
    several, ``row`` itself last."""
    games = dict.fromkeys((member.name for member in members), 0)
    for cell in payoffs:
        for player, other in ((cell.row, cell.column), (cell.column, cell.row)):
            if player == row and other in games:
                games[other] += cell.games
    order = [(member.name == row, games[member.name], -place) for place, member in enumerate(members)]
    return -min(order)[2]
