"""Random small runs under random faults."""

import os

import pytest

from flexmarl.launch.simulate.chaos.examination import examine_seed

# Two a second. More of them: FLEXMARL_CHAOS_SEEDS=300 scripts/test tests/launch/simulate/chaos/test_chaos_seeds.py
SEEDS = int(os.environ.get("FLEXMARL_CHAOS_SEEDS", "40"))
AT_ONCE = 10


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_a_run_under_faults_trains_what_it_trains_without_them(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        failure = examine_seed(seed)
        assert failure is None, failure.text()
