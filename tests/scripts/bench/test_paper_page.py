"""The tables of the page of FlexMARL's results."""

from dataclasses import replace

import pytest

from flexmarl.launch.simulate.baselines import BASELINES
from scripts.bench.paper import RESULTS, scenario_of
from scripts.bench.paper_cases import GANGS, PAPER_S, Case, page_cases
from scripts.bench.paper_page import PAGE, with_tables
from scripts.bench.paper_results import Results, Row

FIGURES = dict.fromkeys(
    (
        "step_s", "tokens_per_s", "rollout_alone_s", "overlap_s", "training_alone_s", "swaps_exposed_s",
        "weights_exposed_s", "training_busy", "instances_busy",
    ),
    0.5,
)  # fmt: skip


def row(case: Case, step_s: float) -> Row:
    return Row(case, "code", FIGURES | {"step_s": step_s})


def table(name: str, rows: list[Row]) -> list[list[str]]:
    text = with_tables(f"before\n<!-- table: {name} -->\nold\n<!-- end -->\nbehind\n", rows)
    lines = text.splitlines()
    assert lines[0] == "before" and lines[-1] == "behind" and "old" not in lines
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:-2]]


def test_the_page_has_the_tables_of_its_results() -> None:
    text = PAGE.read_text()
    assert with_tables(text, Results(RESULTS).rows) == text, "write them by: scripts/bench/run paper --page"


def test_ours_and_the_papers_system_were_played_with_one_code() -> None:
    rows = Results(RESULTS).rows
    compared = ("flexmarl-paper", "flexmarl", "without-balancing", "without-pipeline", "without-sharing")
    assert len({row.code for row in rows if row.case.mode in compared}) == 1
    assert {row.case for row in rows} <= {*page_cases()}


def test_a_mode_has_the_seconds_of_the_first_seed_and_its_ratio_of_that() -> None:
    of = "merchant-assistant"
    reference = [
        row(Case(of, "flexmarl-paper", 2048 + n), seconds) for n, seconds in enumerate((100.0, 110.0))
    ]
    ours = [row(Case(of, "flexmarl", 2048 + n), seconds) for n, seconds in enumerate((80.0, 55.0, 75.0))]
    lines = table(f"modes {of}", [*ours, *reference])
    assert lines[2:] == [
        ["`flexmarl-paper`", "100.0", "110.0", "1.00", "0", "126.1", "1.00"],
        ["`flexmarl`", "80.0", "55.0, 75.0", "0.80", "0", "–", "–"],
    ]
    last = table("ablations", [*ours, *reference])[-1]
    assert last == ["all of ours (`flexmarl-paper`)", "1.62 (1.25 to 2.00)", "–", "–"]


def test_the_papers_ratios_are_to_its_own_system() -> None:
    merchant = PAPER_S["merchant-assistant"]
    assert round(merchant["mas-rl"] / merchant["flexmarl-paper"], 2) == 7.25
    assert all(mode in BASELINES for modes in PAPER_S.values() for mode in modes)
    assert [line[-1] for line in table("ablations", [])[2:]] == ["1.21 and 1.22", "2.03 and 1.57", "–", "–"]


def test_sizes_of_gangs_are_compared_with_the_same_seed() -> None:
    of = "merchant-assistant"
    eight = Case(of, "flexmarl-paper", 2048, GANGS[of]["8"])
    rows = [row(eight, 90.0), row(Case(of, "flexmarl", 2048), 75.0), row(Case(of, "flexmarl", 2049), 10.0)]
    assert [line for line in table(f"gangs {of}", rows) if line[0] == "8"] == [["8", "90.0", "1.20"]]


def test_a_table_that_is_unknown_has_an_error() -> None:
    with pytest.raises(KeyError, match="mode"):
        table("mode", [])


@pytest.mark.parametrize("scenario", GANGS)
def test_gangs_of_other_sizes_have_the_ranks_that_their_lines_say(scenario: str) -> None:
    for words, overrides in GANGS[scenario].items():
        config = scenario_of(Case(scenario, "flexmarl-paper", 2048, overrides)).config
        ranks = {policy.trainer.most_ranks for policy in config.trained.values()}
        assert ranks == {int(number) for number in words.split(" and ")}
        assert all(policy.trainer.min_ranks is None for policy in config.trained.values())


def test_all_cases_of_the_page_can_be_played() -> None:
    cases = page_cases()
    assert len({*cases}) == len(cases)
    for case in cases:
        if case.seed == 2048:
            scenario_of(case)
    assert replace(cases[0], seed=1).words == "merchant-assistant, mas-rl, seed 1"
