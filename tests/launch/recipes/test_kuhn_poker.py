"""kuhn-poker: payoffs, play, and the exploitability against calculations by hand."""

from itertools import permutations
from math import exp, log
from typing import Any

import pytest

from flexmarl.actors.workflow import Prompt, Query, Turn
from flexmarl.launch.recipes.kuhn_poker.workflow import (
    FIRST,
    SECOND,
    bet_probability,
    exploitability,
    payoff,
    present_and_past,
    train_query,
    value,
    workflow,
)

from .scripted import Scripted

SITUATIONS = FIRST + SECOND


def equilibrium(alpha: float) -> dict[str, float]:
    """Kuhn's equilibria: the first player has one for each ``alpha`` from 0 to 1/3, the second has this one alone."""
    return {
        "J": alpha, "Q": 0, "K": 3 * alpha, "Jpb": 0, "Qpb": alpha + 1 / 3, "Kpb": 1,
        "Jp": 1 / 3, "Qp": 0, "Kp": 1, "Jb": 0, "Qb": 1 / 3, "Kb": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("deal", "history", "won"),
    [
        ("KQ", "pp", 1), ("JQ", "pp", -1), ("JK", "bp", 1), ("KJ", "pbp", -1), ("KQ", "bb", 2), ("QK", "pbb", -2),
    ],
)  # fmt: skip
def test_payoffs(deal: str, history: str, won: int) -> None:
    assert payoff(tuple(deal), history) == won


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_an_equilibrium_has_no_exploitability_and_the_game_its_value(alpha: float) -> None:
    strategy = equilibrium(alpha)
    assert exploitability(strategy) == pytest.approx(0.0, abs=1e-12)
    assert value(strategy, strategy) == pytest.approx(-1 / 18)


def test_players_that_always_bet_are_exploited_by_a_fold() -> None:
    """By hand: against a bet, Q and K call or fold. The best opponent of a first player that always bets folds J (-1),
    calls K (+2), and calls Q (+2 against J, -2 against K: 0): (-1 + 0 + 2) / 3 = 1/3 for each card. The best opponent
    of a second player that always bets wins as much: it bets or calls with K (+2), passes and folds J (-1), and with Q
    gets 0 by calling. The mean is 1/3."""
    always = dict.fromkeys(SITUATIONS, 1.0)
    assert value(always, always) == 0.0
    assert exploitability(always) == pytest.approx(1 / 3)


def test_players_that_always_pass_are_exploited_by_bets() -> None:
    """By hand: every bet wins the ante, so both best opponents bet always and win 1."""
    assert exploitability(dict.fromkeys(SITUATIONS, 0.0)) == pytest.approx(1.0)


def test_the_exploitability_of_random_play() -> None:
    """11/24, half of the NashConv 11/12 that OpenSpiel has for the uniform policy."""
    assert exploitability(dict.fromkeys(SITUATIONS, 0.5)) == pytest.approx(11 / 24)


@pytest.mark.parametrize("seat", ["first", "second"])
@pytest.mark.parametrize(
    ("first", "second", "prompts", "won"),
    [
        (["p", "b"], ["b"], ["K..=", "Kpb="], 2.0),
        (["p", "p"], ["b"], ["K..=", "Kpb="], -1.0),
        (["p"], ["K"], ["K..="], 1.0),  # an illegal answer is a pass
        (["b"], ["p"], ["K..="], 1.0),
    ],
)
async def test_a_game(seat: str, first: list[str], second: list[str], prompts: list[str], won: float) -> None:
    names = ("player", "rival") if seat == "first" else ("rival", "player")
    agents = {name: Scripted(name, *answers) for name, answers in zip(names, (first, second), strict=True)}
    query = Query("q", "KQ", {"deal": ("K", "Q"), "seat": seat, "measure": False})
    rewards = (await workflow(query, agents)).checked()
    assert agents[names[0]].prompts == prompts
    assert rewards.by_agent == {names[0]: won, names[1]: -won}


def test_twelve_games_in_turn_are_all_deals_in_both_seats() -> None:
    games = [
        (query.data["deal"], query.data["seat"]) for query in (train_query(n, seed=3) for n in range(24))
    ]
    assert set(games[:12]) == set(games[12:]) and len(set(games)) == 12
    assert games[:12] != games[12:]


@pytest.mark.parametrize(("members", "weights"), [(1, [1]), (2, [1, 1]), (4, [1, 1, 1, 3])])
def test_half_of_the_opponents_are_the_newest_member(members: int, weights: list[float]) -> None:
    assert present_and_past([object()] * members) == weights


class Player:
    """Plays a strategy: bets where a bet is the more probable action."""

    def __init__(self, strategy: dict[str, float]) -> None:
        self.strategy = strategy

    async def generate(self, prompt: Prompt, **options: Any) -> Turn:
        assert isinstance(prompt, str)
        bet = self.strategy[prompt.removesuffix("=").rstrip(".")]
        action, probability = ("b", bet) if bet >= 0.5 else ("p", 1 - bet)
        return Turn("player", action, (), (), logprobs=(log(probability),))


async def test_the_measurement_reads_the_strategy_from_log_probabilities() -> None:
    strategy = {name: (number + 1) / 14 for number, name in enumerate(SITUATIONS)}
    player = Player(strategy)
    rewards = await workflow(Query("measure", "", {"measure": True}), {"player": player})
    assert rewards.metrics["exploitability"] == pytest.approx(exploitability(strategy))
    assert rewards.metrics["first_wins"] == pytest.approx(value(strategy, strategy))
    assert rewards.metrics["illegal_answers"] == 0


async def test_an_illegal_answer_is_seen() -> None:
    assert await bet_probability(Scripted("player", "J", logprob=-3.0), "J") == (1 - exp(-3.0), False)


def test_all_situations_are_there() -> None:
    deals = [*permutations("JQK", 2)]
    assert len(SITUATIONS) == len(set(SITUATIONS)) == 12 and len(deals) == 6
