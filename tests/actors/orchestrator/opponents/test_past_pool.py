"""Ratings, recent results and the pay-off matrix, against computations by hand."""

from dataclasses import asdict

import pytest
from pydantic import TypeAdapter

from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.orchestrator.opponents.past_pool import Game, Member, PastPool, Payoff

PLAYER, SPY = PolicyName("player"), PolicyName("spy")
WON, DRAWN, LOST = Game(1.0, -1.0), Game(0.0, 0.0), Game(-2.0, 2.0)


def pool_of(*steps: int, size: int = 9) -> PastPool:
    pool = PastPool()
    for step in steps:
        assert pool.add(PLAYER, Step(step), Version(step), size)
    pool.play(pool.members[0])
    return pool


def test_a_game_is_won_by_the_greater_reward() -> None:
    assert [game.score for game in (WON, DRAWN, LOST, Game(0.5, 0.4))] == [1.0, 0.5, 0.0, 1.0]


def test_elo_is_that_of_a_computation_by_hand() -> None:
    """Equal ratings: 1/2 is expected, a win moves both by 16/2. Then 1016 - 984 - ... as the formula says."""
    pool = pool_of(0)
    pool.played([WON])
    assert (pool.elo, pool.members[0].elo) == (1008.0, 992.0)
    pool.played([LOST])  # expected 1 / (1 + 10 ** (-16 / 400)) = 0.5230096
    assert pool.elo == pytest.approx(1008.0 - 16 * 0.5230096, abs=1e-5)
    assert pool.elo + pool.members[0].elo == pytest.approx(2000.0, abs=1e-9)
    at_400 = pool_of(0)
    at_400.elo += 400.0
    at_400.played([DRAWN])  # expected 10 / 11
    assert at_400.elo == pytest.approx(1400.0 + 16 * (0.5 - 10 / 11), abs=1e-9)


def test_win_rates_forget_as_alphastars_do() -> None:
    pool = pool_of(0)
    assert pool.members[0].win_rate == 0.5, "without a game"
    pool.played([WON, LOST, DRAWN])
    games, score = 0.99**2 + 0.99 + 1.0, 0.99**2 + 0.5
    assert pool.members[0].win_rate == pytest.approx(score / games, abs=1e-12)


def test_the_pay_off_matrix_has_a_row_for_each_version_in_training() -> None:
    pool = pool_of(0)
    pool.count([WON, LOST], PLAYER)
    pool.add(PLAYER, Step(5), Version(5), 9)
    pool.count([LOST], PLAYER)  # member 0 still plays
    assert pool.play(pool.members[1])
    pool.count([DRAWN], PLAYER)
    assert pool.payoffs == [
        Payoff("player@0", "player@0", 2, 1.0, -1.0, 1.0),
        Payoff("player@5", "player@0", 1, 0.0, -2.0, 2.0),
        Payoff("player@5", "player@5", 1, 0.5, 0.0, 0.0),
    ]


def test_a_new_member_has_the_rating_that_the_policy_had_in_training() -> None:
    pool = pool_of(0)
    pool.played([WON])
    pool.add(PLAYER, Step(2), Version(2), 9)
    assert pool.members[1] == Member(PLAYER, Step(2), Version(2), 1008.0)


def test_the_oldest_member_leaves_with_its_results() -> None:
    pool = pool_of(0, 1, size=2)
    pool.count([WON], PLAYER)
    pool.play(pool.members[1])
    pool.count([WON], PLAYER)
    pool.add(PLAYER, Step(2), Version(2), 2)
    assert [member.step for member in pool.members] == [1, 2]
    assert [(each.row, each.column) for each in pool.payoffs] == [("player@1", "player@1")]


def test_weights_that_did_not_change_are_no_new_member() -> None:
    pool = pool_of(0)
    assert not pool.add(PLAYER, Step(1), Version(0), 9)
    assert [member.step for member in pool.members] == [0]


def test_the_version_counts_changes_of_the_member_that_plays() -> None:
    pool = pool_of(0, 1)
    assert (pool.version, pool.member) == (1, "player@0")
    assert not pool.play(pool.members[0]) and pool.version == 1
    assert pool.play(pool.members[1]) and (pool.version, pool.member) == (2, "player@1")


def test_a_pool_survives_a_checkpoint() -> None:
    pool = pool_of(0, 1)
    pool.played([WON, DRAWN])
    assert TypeAdapter(PastPool).validate_python(asdict(pool)) == pool


def test_versions_of_several_policies_are_members_by_their_names() -> None:
    pool = pool_of(0)
    assert pool.add(SPY, Step(0), Version(0), 9), "another policy may have the same version"
    assert not pool.add(SPY, Step(3), Version(0), 9)
    assert pool.add(PLAYER, Step(3), Version(3), 9)
    assert [member.name for member in pool.members] == ["player@0", "spy@0", "player@3"]
    assert pool.newest_of(SPY) == pool.members[1] and pool.newest_of(PolicyName("none")) is None
    pool.play(pool.members[1])
    pool.count([LOST], PLAYER)
    assert pool.payoffs[-1] == Payoff("player@3", "spy@0", 1, 0.0, -2.0, 2.0)


def test_a_policy_outside_the_pool_has_rows_by_the_newest_step() -> None:
    pool = pool_of(0, 4)
    pool.count([WON], SPY)
    assert [(cell.row, cell.column) for cell in pool.payoffs] == [("spy@4", "player@0")]
    pool.add(PLAYER, Step(8), Version(8), 2)
    assert pool.payoffs == [], "the column has left"
