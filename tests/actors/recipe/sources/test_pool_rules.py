"""The rules by which sources choose from a pool: their formulas, and what they choose."""

import math
from collections import Counter
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.recipe.sources.band_source import BandConfig, BandRule
from flexmarl.actors.recipe.sources.belief import Belief
from flexmarl.actors.recipe.sources.query_pool import Rule
from flexmarl.actors.recipe.sources.rare_success_source import RareSuccessConfig, RareSuccessRule
from flexmarl.actors.recipe.sources.variance_source import VarianceConfig, VarianceRule

COUNTS = st.floats(0.0, 50.0)
BELIEFS = st.lists(st.builds(Belief, COUNTS, COUNTS, st.just(1), st.integers(0, 3)), min_size=1, max_size=9)
RULES: dict[str, Rule] = {
    "variance": VarianceConfig().rule(),
    "rare_success": RareSuccessConfig().rule(),
    "rare_success without unsolved": RareSuccessConfig(unsolved=0.0).rule(),
    "band": BandConfig().rule(),
    "band alone": BandConfig(explore=0.0).rule(),
}


def belief(solved: float, failed: float, groups: int = 1) -> Belief:
    return Belief(solved, failed, 1, groups)


def choices(rule: Rule, beliefs: list[Belief], draws: int = 2000) -> list[float]:
    """The share of the draws by candidate."""
    counts = Counter(rule.choose(beliefs, Random(f"test {draw}")) for draw in range(draws))
    return [counts[number] / draws for number in range(len(beliefs))]


@pytest.mark.parametrize("name", RULES)
@given(beliefs=BELIEFS, seed=st.integers(0, 99))
def test_every_rule_chooses_a_candidate_and_the_same_one_again(
    name: str, beliefs: list[Belief], seed: int
) -> None:
    number = RULES[name].choose(beliefs, Random(seed))
    assert 0 <= number < len(beliefs)
    assert number == RULES[name].choose(beliefs, Random(seed))


@given(solved=st.integers(0, 6), failed=st.integers(0, 6))
def test_the_expected_variance_is_that_of_the_distribution(solved: int, failed: int) -> None:
    """Beta(0.5 + solved, 0.5 + failed), integrated by the midpoint rule over the angle whose squared sine is p."""
    points = [math.sin(math.pi / 2 * (n + 0.5) / 2000) ** 2 for n in range(2000)]
    densities = [p**solved * (1 - p) ** failed for p in points]
    expected = sum(p * (1 - p) * d for p, d in zip(points, densities, strict=True)) / sum(densities)
    assert VarianceRule().value(belief(solved, failed)) == pytest.approx(expected, rel=1e-4)


def test_of_queries_that_are_well_known_the_one_that_differs_most_is_given() -> None:
    always, never, half = belief(200.0, 0.0), belief(0.0, 200.0), belief(100.0, 100.0)
    assert choices(VarianceRule(), [always, half, never], 200) == [0.0, 1.0, 0.0]


def test_queries_of_which_nothing_is_known_come_before_those_that_teach_nothing_in_any_order() -> None:
    shares = choices(
        VarianceRule(), [belief(0.0, 4.0), belief(0.0, 0.0, 0), belief(4.0, 0.0), belief(0.0, 0.0, 0)]
    )
    assert shares[0] == shares[2] == 0.0 and 0.45 < shares[1] < 0.55


def test_a_query_comes_back_when_its_evidence_has_faded() -> None:
    """Its value at first is 0.5 * 8.5 / (9 * 10), less than the other's 1 * 8 / (9 * 10), and 0.125 in the end."""
    failed, solved_seldom = Belief(0.0, 8.0, 1, 1), Belief(0.5, 7.5, 1, 1)
    assert choices(VarianceRule(), [failed, solved_seldom], 50) == [0.0, 1.0]
    assert choices(VarianceRule(), [failed.at(200, 0.98), solved_seldom], 50) == [1.0, 0.0]


def test_rare_successes_by_their_weights() -> None:
    """Solved 1 of 10, 9 of 10, never, and not tried: 0.9, 0.1, 0.1 and 1 of 2.1."""
    rule = RareSuccessRule(power=1.0, unsolved=0.1)
    beliefs = [belief(1.0, 9.0), belief(9.0, 1.0), belief(0.0, 10.0), belief(0.0, 0.0, groups=0)]
    weights = [rule.value(each) for each in beliefs]
    assert weights == pytest.approx([0.9, 0.1, 0.1, 1.0])
    assert choices(rule, beliefs, 8000) == pytest.approx([weight / 2.1 for weight in weights], abs=0.02)


def test_the_power_and_a_success_of_long_ago() -> None:
    rule = RareSuccessRule(power=2.0, unsolved=0.0)
    assert rule.value(belief(1.0, 3.0)) == pytest.approx(0.75**2)
    assert rule.value(belief(0.04, 3.0)) == 0.0
    assert choices(rule, [belief(0.0, 3.0), belief(0.0, 5.0)]) == pytest.approx([0.5, 0.5], abs=0.05)


def test_the_band_comes_first_and_the_rest_of_the_draws_looks_at_the_others() -> None:
    within, easy, new = belief(5.0, 5.0), belief(20.0, 0.0), belief(0.0, 0.0, groups=0)
    shares = choices(BandRule(0.2, 0.8, explore=0.25), [within, easy, new])
    assert shares == pytest.approx([0.75, 0.0, 0.25], abs=0.03)
    assert choices(BandRule(0.2, 0.8, explore=0.0), [easy, within], 100) == [0.0, 1.0]


def test_outside_the_band_the_one_of_which_the_least_is_left_is_looked_at() -> None:
    rule = BandRule(0.4, 0.6, explore=1.0)
    assert rule.choose([belief(9.0, 0.0), belief(2.0, 0.0), belief(0.0, 8.0)], Random(0)) == 1


def test_the_value_falls_with_the_distance_from_the_band() -> None:
    rule = BandRule(0.2, 0.8, explore=0.1)
    assert rule.value(belief(1.0, 1.0)) == rule.value(Belief()) == 0.0
    assert rule.value(belief(8.0, 0.0)) == pytest.approx(0.8 - 0.9)
    assert rule.value(belief(0.0, 18.0)) == pytest.approx(0.05 - 0.2)


def test_no_rule_prefers_a_query_by_its_place_alone() -> None:
    beliefs = [belief(2.0, 2.0) for _ in range(4)]
    for rule in (VarianceRule(), RareSuccessRule(1.0, 0.1), BandRule(0.2, 0.8, 0.0)):
        assert fmean(choices(rule, beliefs)) == 0.25
        assert choices(rule, beliefs) == pytest.approx([0.25] * 4, abs=0.04)
