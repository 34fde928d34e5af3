"""The rules of patches and the returns of turns: their formulas by hand, and what they keep to."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from flexmarl.actors.demonstrations.chance import ChanceRule
from flexmarl.actors.demonstrations.demonstration_config import DemonstrationConfig
from flexmarl.actors.demonstrations.patch_rule import Departure, PatchRule, match_returns
from flexmarl.actors.demonstrations.threshold import ThresholdRule

CONFIG: TypeAdapter[PatchRule] = TypeAdapter(DemonstrationConfig)


def test_returns_are_discounted_and_broken_off_at_departures() -> None:
    # From the last: 1; 0; 1 + 0.5 * 0; 1 + 0.5 * 1; 0; 1 + 0.5 * 0.
    matches = [True, False, True, True, False, True]
    assert match_returns(matches, 0.5) == [1.0, 0.0, 1.5, 1.0, 0.0, 1.0]
    assert match_returns([True] * 4, 0.5) == [1.875, 1.75, 1.5, 1.0]
    assert match_returns([True, True, False], 1.0) == [2.0, 1.0, 0.0]
    assert match_returns([True, True, False], 0.0) == [1.0, 1.0, 0.0]
    assert match_returns([], 0.5) == []


@given(st.lists(st.booleans()), st.floats(0.0, 0.99))
def test_a_return_is_the_sum_of_the_agreements_until_the_next_departure(
    matches: list[bool], decay: float
) -> None:
    for place, amount in enumerate(match_returns(matches, decay)):
        until = next((end for end in range(place, len(matches)) if not matches[end]), len(matches))
        assert amount == pytest.approx(sum(decay**step for step in range(until - place)), abs=1e-12)


def test_a_threshold_patches_so_many_departures() -> None:
    def patches(most: int | None) -> list[bool]:
        rule = ThresholdRule(file="walks.jsonl", most=most)
        return [rule.patches(Departure(count, 0.9)) for count in range(4)]

    assert patches(0) == [False] * 4
    assert patches(2) == [True, True, False, False]
    assert patches(None) == [True] * 4


@given(st.integers(0, 9), st.floats(0.0, 1.0, exclude_max=True), st.floats(0.0, 1.0))
def test_a_chance_looks_at_the_draw_alone(patches: int, draw: float, chance: float) -> None:
    rule = ChanceRule(file="walks.jsonl", chance=chance)
    assert rule.patches(Departure(patches, draw)) == (draw < chance)
    assert not ChanceRule(file="", chance=0.0).patches(Departure(patches, draw))
    assert ChanceRule(file="", chance=1.0).patches(Departure(patches, draw))


def test_the_key_patch_chooses_the_rule() -> None:
    assert CONFIG.validate_python({"file": "w"}) == ThresholdRule(file="w", most=1, decay=0.5)
    assert CONFIG.validate_python({"file": "w", "patch": "chance"}) == ChanceRule(file="w", chance=0.5)


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"file": "w", "patch": "often"},
        {"file": "w", "most": -1},
        {"file": "w", "chance": 0.5},
        {"file": "w", "patch": "chance", "chance": 1.5},
        {"file": "w", "decay": 1.5},
    ],
)
def test_other_sections_are_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CONFIG.validate_python(section)
