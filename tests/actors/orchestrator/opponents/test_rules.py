"""The draw of opponents: its weights, its frequencies, and that seed and step alone decide it."""

from collections import Counter

import pytest

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.orchestrator.opponents.past_pool import Game, Member, PastPool
from flexmarl.actors.orchestrator.opponents.rules import (
    Rule,
    draw_member,
    latest,
    nash,
    pfsp,
    rule_of_function,
    uniform,
)

RIVAL, PLAYER = PolicyName("rival"), PolicyName("player")


def members(*win_rates: float) -> PastPool:
    return PastPool(
        [
            Member(PLAYER, Step(n), Version(n), games=10.0, score=10.0 * rate)
            for n, rate in enumerate(win_rates)
        ]
    )


def frequencies(rule: Rule, of: PastPool, draws: int = 4000) -> list[float]:
    counts = Counter(draw_member(rule, of, PLAYER, 7, RIVAL, Step(step)).step for step in range(draws))
    return [counts[member.step] / draws for member in of.members]


def test_pfsp_weights_are_those_of_the_paper() -> None:
    assert pfsp(members(0.5, 0.9, 1.0, 0.0), PLAYER) == pytest.approx([0.25, 0.01, 0.0, 1.0])
    assert pfsp(members(0.5, 0.9), PLAYER, power=1.0) == pytest.approx([0.5, 0.1])
    assert pfsp(PastPool([Member(PLAYER, Step(0), Version(0))]), PLAYER) == [0.25], "0.5 without a game"


def test_members_are_drawn_by_their_weights() -> None:
    assert frequencies(uniform, members(0.1, 0.5, 0.9)) == pytest.approx([1 / 3] * 3, abs=0.03)
    assert frequencies(latest, members(0.1, 0.5, 0.9)) == [0.0, 0.0, 1.0]
    assert frequencies(pfsp, members(0.5, 0.9, 1.0)) == pytest.approx([25 / 26, 1 / 26, 0.0], abs=0.02)
    assert frequencies(pfsp, members(1.0, 1.0)) == pytest.approx([0.5, 0.5], abs=0.03), (
        "all are beaten always"
    )


def test_the_draw_is_a_function_of_seed_policy_and_step() -> None:
    of = members(0.5, 0.5, 0.5, 0.5)
    draws = [
        [draw_member(uniform, of, PLAYER, seed, PolicyName(name), Step(step)).step for step in range(64)]
        for seed, name in ((1, "rival"), (1, "rival"), (2, "rival"), (1, "other"))
    ]
    assert draws[0] == draws[1] and draws[0] != draws[2] and draws[0] != draws[3]


@pytest.mark.parametrize("weights", [[], [1.0], [1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0]])
def test_weights_of_a_rule_are_checked(weights: list[float]) -> None:
    with pytest.raises(RecipeError, match="the rule of the past versions 'rival' gives the weights"):
        draw_member(rule_of_function(lambda _: weights), members(0.5, 0.5), PLAYER, 1, RIVAL, Step(1))


def test_nash_weighs_a_cycle_evenly_and_measures_what_the_newest_has_not_met() -> None:
    """Three members beat each other in a circle; a fourth, the newest, has met only the first."""
    pool = PastPool()
    for step, beats in ((0, None), (1, 0), (2, 1)):
        pool.add(PLAYER, Step(step), Version(step), 9)
        if beats is not None:
            pool.play(pool.members[beats])
            pool.count([Game(1.0, -1.0)] * 4, PLAYER)
    pool.play(pool.members[0])
    pool.count([Game(-1.0, 1.0)] * 4, PLAYER)
    assert nash(pool, PLAYER, explore=0.0) == pytest.approx([1 / 3] * 3, abs=0.01)
    pool.add(PLAYER, Step(3), Version(3), 9)
    pool.count([Game(-1.0, 1.0)] * 4, PLAYER)
    weights = nash(pool, PLAYER, explore=0.4)
    assert sum(weights) == pytest.approx(1.0)
    assert weights[2] >= 0.4, "of two that the newest has never met, the newer one"
