import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.trainer.objective.advantage import (
    leave_one_out_penalties,
    rewards_to_go,
    whiten,
)

rewards = st.floats(-1e3, 1e3)
groups = st.lists(rewards, min_size=2, max_size=16)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), rewards), min_size=1, max_size=20),
    st.integers(0, 2),
)
def test_penalties_of_a_trajectory_leave_itself_out(rows: list[tuple[int, int, float]], silent: int) -> None:
    """``rows`` are turns: group, trajectory, penalty. ``silent`` trajectories of each group have no turn."""
    totals: dict[int, dict[int, float]] = {}
    for group, trajectory, penalty in rows:
        of_group = totals.setdefault(group, {})
        of_group[trajectory] = of_group.get(trajectory, 0.0) + penalty
    found = leave_one_out_penalties(
        torch.tensor([penalty for *_, penalty in rows], dtype=torch.float64),
        torch.tensor([4 * group + trajectory for group, trajectory, _ in rows]),
        torch.tensor([group for group, *_ in rows]),
        torch.tensor([len(totals[group]) + silent for group, *_ in rows]),
    )
    for n, (group, trajectory, _) in enumerate(rows):
        others = [p for t, p in totals[group].items() if t != trajectory] + [0.0] * silent
        expected = totals[group][trajectory] - statistics.fmean(others) if others else 0.0
        assert math.isclose(found[n].item(), expected, rel_tol=1e-9, abs_tol=1e-7)


# --------------------------------------------------------------------------- over a whole step


@given(st.lists(st.tuples(rewards, st.lists(rewards, min_size=1, max_size=6)), min_size=1, max_size=6))
def test_rewards_to_go_count_what_is_still_to_come(batch: list[tuple[float, list[float]]]) -> None:
    found = rewards_to_go(
        torch.tensor([reward for reward, each in batch for _ in each], dtype=torch.float64),
        torch.tensor([r for _, each in batch for r in each], dtype=torch.float64),
        torch.tensor([len(each) for _, each in batch]),
    )
    expected = [reward + math.fsum(each[t:]) for reward, each in batch for t in range(len(each))]
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-8)


@given(st.lists(rewards, min_size=1, max_size=30))
def test_whitened_has_zero_mean_and_unit_variance(values: list[float]) -> None:
    found = whiten(torch.tensor(values, dtype=torch.float64)).tolist()
    mean = statistics.fmean(values)
    spread = math.sqrt(max(statistics.fmean((value - mean) ** 2 for value in values), 1e-8))
    assert found == pytest.approx([(value - mean) / spread for value in values], rel=1e-6, abs=1e-6)


def test_equal_advantages_whiten_to_exactly_nothing() -> None:
    assert whiten(torch.full((7,), 0.1, dtype=torch.float64)).tolist() == [0.0] * 7
