"""Random small runs under random faults."""

import os

import pytest

from flexmarl.launch.simulate.chaos.examination import examine_seed

# Two a second. More of them: FLEXMARL_CHAOS_SEEDS=300 scripts/test tests/launch/simulate/chaos/test_chaos_seeds.py
SEEDS = int(os.environ.get("FLEXMARL_CHAOS_SEEDS", "40"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_run_under_faults_trains_what_it_trains_without_them(seed: int) -> None:
    failure = examine_seed(seed)
    assert failure is None, failure.text()
