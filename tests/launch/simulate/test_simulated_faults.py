"""Plans of faults, and their targets."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from flexmarl.launch.simulate.simulated_faults import CUTS, FaultKind, FaultPlan, choose


def test_groups_have_equal_shares_of_the_places_and_so_have_their_members() -> None:
    groups = [["slot-0"], [], [f"p0-{n}" for n in range(4)]]
    chosen = Counter(choose(groups, place / 1000) for place in range(1000))
    assert chosen == {"slot-0": 500, **dict.fromkeys(groups[2], 125)}


@pytest.mark.parametrize("groups", [[], [[]], [[], []]])
def test_without_targets_none_is_hit(groups: list[list[str]]) -> None:
    assert choose(groups, 0.999) is None


def test_a_pause_is_shorter_than_the_heartbeats_of_the_drawn_runs() -> None:
    plan = FaultPlan(most=50, lasts_s=10.0, for_good=1.0, kinds={FaultKind.PAUSE: 1.0})
    assert all(0.0 < fault.lasts_s <= 0.1 for fault in plan.draw(0))


@pytest.mark.parametrize("kind", CUTS)
def test_a_cut_may_last_for_good(kind: FaultKind) -> None:
    plan = replace(FaultPlan(most=5, for_good=1.0), kinds={kind: 1.0})
    assert [fault.lasts_s for fault in plan.draw(0)] == [math.inf] * 5
