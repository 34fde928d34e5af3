"""Random small runs under random faults."""

import os

import pytest

from flexmarl.launch.simulate.chaos.examination import examine_seed

# Two a second. More of them: FLEXMARL_CHAOS_SEEDS=300 scripts/test tests/launch/simulate/chaos/test_chaos_seeds.py
SEEDS = int(os.environ.get("FLEXMARL_CHAOS_SEEDS", "40"))


# Each of these once failed, by a defect in moves of the states in the pool, of instances between policies, or in the
# simulated links, as one of hundreds.
FAILED = (20466, 20906, 21167, 21189, 21576, 22380, 91516, 130472, 210092)


@pytest.mark.parametrize("seed", [*range(SEEDS), *FAILED])
def test_a_run_under_faults_trains_what_it_trains_without_them(seed: int) -> None:
    failure = examine_seed(seed)
    assert failure is None, failure.text()
