"""Nash mixtures against games with known equilibria, and the matrix against games counted by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.orchestrator.opponents.meta_game import gap, least_measured, meta_game, mixture
from flexmarl.actors.orchestrator.opponents.past_pool import Member, Payoff

PLAYER = PolicyName("player")


def circle(rock: float, paper: float, scissors: float) -> np.ndarray:
    """Rock, paper, scissors: what each wins against the one that it beats."""
    return np.array([[0, -paper, rock], [paper, 0, -scissors], [-rock, scissors, 0]], dtype=np.float64)


@pytest.mark.parametrize(
    ("game", "equilibrium"),
    [
        (circle(1, 1, 1), [1 / 3, 1 / 3, 1 / 3]),
        # By hand: an action's weight is the stake of the game between the other two, over the sum of the stakes.
        (circle(2, 1, 1), [1 / 4, 1 / 2, 1 / 4]),
        (circle(1, 3, 2), [2 / 6, 1 / 6, 3 / 6]),
        (np.zeros((1, 1)), [1.0]),
        (np.zeros((3, 3)), [1 / 3] * 3),
        (np.array([[0, 1], [-1, 0]], dtype=np.float64), [1.0, 0.0]),  # the first action dominates
    ],
)
def test_known_equilibria(game: np.ndarray, equilibrium: list[float]) -> None:
    assert mixture(game) == pytest.approx(equilibrium, abs=0.005)
    assert gap(game, equilibrium) == pytest.approx(0.0, abs=1e-12)


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(0, 2**31))
def test_no_action_wins_much_against_a_mixture(actions: int, seed: int) -> None:
    """The gap is a proof: the value of a symmetric zero-sum game is 0, and the best answer is a pure one."""
    game = np.random.default_rng(seed).normal(size=(actions, actions))
    game = game - game.T
    weights = mixture(game)
    assert sum(weights) == pytest.approx(1.0) and min(weights) >= 0
    assert gap(game, weights) <= 2e-3 * np.abs(game).max()


def test_a_pure_member_of_a_circle_has_the_gap_of_the_one_that_beats_it() -> None:
    assert gap(circle(1, 3, 2), [1.0, 0.0, 0.0]) == 3.0


def members(count: int) -> list[Member]:
    return [Member(PLAYER, Step(step), Version(step)) for step in range(count)]


def test_a_cell_has_the_games_of_both_sides() -> None:
    payoffs = [
        Payoff("player@1", "player@0", games=3, reward=3.0, against=-3.0),
        Payoff("player@0", "player@1", games=1, reward=1.0, against=-1.0),
        Payoff("player@1", "player@1", games=9, reward=5.0, against=-5.0),  # against itself: it says nothing
        Payoff("other@1", "player@0", games=9, reward=5.0, against=-5.0),  # not a member
    ]
    game = meta_game(members(3), payoffs)
    assert game.tolist() == [[0, -0.5, 0], [0.5, 0, 0], [0, 0, 0]]
    assert least_measured(members(3), payoffs, "player@1") == 2
    assert least_measured(members(3), payoffs, "player@2") == 1, "the newer of two that have not met it"
    assert least_measured(members(1), [], "player@0") == 0
