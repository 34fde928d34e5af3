"""Cases that are drawn from seeds."""

import math

from flexmarl.launch.simulate.chaos.chaos_case import draw_case
from flexmarl.launch.simulate.simulated_faults import ALL_KINDS, FaultKind

SEEDS = range(300)


def test_a_seed_decides_the_case_and_each_case_is_a_valid_run() -> None:
    for seed in SEEDS:
        case = draw_case(seed)
        assert case == draw_case(seed)
        assert case.config().simulated


def test_the_cases_have_all_kinds_of_runs_and_faults() -> None:
    cases = [draw_case(seed) for seed in SEEDS]
    configs = [case.config() for case in cases]
    assert {config.mode for config in configs} == {"strict", "sync", "async"}
    assert {config.pool.name for config in configs} == {"static", "shared"}
    assert {config.balance.scope for config in configs} == {"off", "intra", "intra+inter"}
    assert {len(config.policies) for config in configs} == {1, 2, 3}
    assert any(len(config.agents) > len(config.policies) for config in configs), "agents share a policy"
    assert {fault.kind for case in cases for fault in case.faults} == set(ALL_KINDS)
    assert any(fault.lasts_s == math.inf for case in cases for fault in case.faults)
    assert {case.hosts for case in cases} == {1, 2, 3, 4}
    assert any(
        config.pool.name == "shared" and config.pool.slot_count < len(config.policies) for config in configs
    )


def test_a_case_whose_links_between_nodes_are_cut_has_two_nodes() -> None:
    cut = [
        case for case in map(draw_case, SEEDS) if FaultKind.CUT_NODES in {fault.kind for fault in case.faults}
    ]
    assert cut and min(case.hosts for case in cut) == 3


def test_neighbouring_seeds_share_a_run_and_each_has_faults_of_its_own() -> None:
    cases = [draw_case(seed) for seed in range(8, 16)]
    assert all(case.settings == cases[0].settings for case in cases)
    assert len({case.faults for case in cases}) == 8
    assert draw_case(16).settings != cases[0].settings


def test_a_case_with_some_of_its_faults_is_the_same_run() -> None:
    case = next(case for case in map(draw_case, SEEDS) if len(case.faults) >= 3)
    smaller = case.with_faults({0, 2})
    assert smaller.faults == (case.faults[0], case.faults[2])
    assert smaller.settings == case.settings and smaller.link_faults == case.link_faults
