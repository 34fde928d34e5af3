"""The chance that a query is solved: against Bayes' rule in exact fractions, and worked by hand."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.recipe.sources.belief import Belief

GROUPS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=8)
WEIGHT = st.sampled_from([0.0, 0.25, 0.5, 1.0])


def after(belief: Belief, solved: int, step: int, decay: float, drift: float) -> Belief:
    return belief.after(solved / 4, 4, step, decay=decay, drift=drift)


def test_a_query_that_nobody_has_tried_is_as_likely_solved_as_not() -> None:
    assert Belief().mean == 0.5


def test_two_groups_worked_by_hand() -> None:
    """3 of 4, then two steps later 1 of 4: what is left of the first is 0.5 * 0.9 ** 2 = 0.405 of it."""
    belief = after(Belief(), 3, 1, 0.5, 0.9)
    assert (belief.solved, belief.failed, belief.mean) == (3.0, 1.0, 4 / 6)
    belief = after(belief, 1, 3, 0.5, 0.9)
    assert belief.solved == pytest.approx(3 * 0.405 + 1)
    assert belief.failed == pytest.approx(1 * 0.405 + 3)
    assert belief.mean == pytest.approx((1 + 2.215) / (2 + 5.62))
    assert (belief.step, belief.groups) == (3, 2)


@given(groups=GROUPS)
def test_without_decay_the_mean_is_laplaces_rule_of_succession(groups: list[tuple[int, int]]) -> None:
    belief, step, solved = Belief(), 0, 0
    for count, later in groups:
        step += later
        solved += count
        belief = after(belief, count, step, 1.0, 1.0)
    assert belief.mean == pytest.approx(float(Fraction(1 + solved, 2 + 4 * len(groups))))


@given(groups=GROUPS, decay=WEIGHT, drift=WEIGHT)
def test_the_weights_of_the_groups_are_products_of_the_two_decays(
    groups: list[tuple[int, int]], decay: float, drift: float
) -> None:
    belief, steps, step = Belief(), [], 0
    for count, later in groups:
        step += later
        steps.append(step)
        belief = after(belief, count, step, decay, drift)
    weights = [decay ** (len(steps) - 1 - n) * drift ** (step - steps[n]) for n in range(len(steps))]
    assert belief.solved == pytest.approx(sum(w * c for w, (c, _) in zip(weights, groups, strict=True)))
    assert belief.solved + belief.failed == pytest.approx(4 * sum(weights))


def test_evidence_fades_with_the_steps_and_does_not_grow_again() -> None:
    belief = after(Belief(), 4, 2, 1.0, 0.5)
    later = belief.at(4, 0.5)
    assert (later.solved, later.step, later.groups) == (1.0, 4, 1)
    assert later.at(3, 0.5) == later
    assert later.at(4, 0.5) == later
