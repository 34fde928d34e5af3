"""The draw of opponents: its weights, its frequencies, and that seed and step alone decide it."""

from collections import Counter
from collections.abc import Sequence

import pytest

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.orchestrator.opponents.past_pool import Member
from flexmarl.actors.orchestrator.opponents.rules import Rule, draw_member, latest, pfsp, uniform

RIVAL = PolicyName("rival")


def members(*win_rates: float) -> list[Member]:
    return [Member(Step(n), Version(n), games=10.0, score=10.0 * rate) for n, rate in enumerate(win_rates)]


def frequencies(rule: Rule, of: Sequence[Member], draws: int = 4000) -> list[float]:
    counts = Counter(draw_member(rule, of, 7, RIVAL, Step(step)).step for step in range(draws))
    return [counts[member.step] / draws for member in of]


def test_pfsp_weights_are_those_of_the_paper() -> None:
    assert pfsp(members(0.5, 0.9, 1.0, 0.0)) == pytest.approx([0.25, 0.01, 0.0, 1.0])
    assert pfsp(members(0.5, 0.9), power=1.0) == pytest.approx([0.5, 0.1])
    assert pfsp([Member(Step(0), Version(0))]) == [0.25], "0.5 without a game"


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
        [draw_member(uniform, of, seed, PolicyName(name), Step(step)).step for step in range(64)]
        for seed, name in ((1, "rival"), (1, "rival"), (2, "rival"), (1, "other"))
    ]
    assert draws[0] == draws[1] and draws[0] != draws[2] and draws[0] != draws[3]


@pytest.mark.parametrize("weights", [[], [1.0], [1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0]])
def test_weights_of_a_rule_are_checked(weights: list[float]) -> None:
    with pytest.raises(RecipeError, match="the rule of the past versions 'rival' gives the weights"):
        draw_member(lambda _: weights, members(0.5, 0.5), 1, RIVAL, Step(1))
