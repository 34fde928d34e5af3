"""The runs of a sweep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.sweep.grid import SweptRun, runs_of


def test_each_combination_is_a_run_and_its_values_are_its_name() -> None:
    settings = ["training.steps=40", "seed=0,1", "agent_defaults.optimizer.lr=1e-5,3e-5"]
    assert runs_of("first", settings) == [
        SweptRun(
            f"first-seed={seed}-lr={lr}",
            ("training.steps=40", f"seed={seed}", f"agent_defaults.optimizer.lr={lr}"),
        )
        for seed in (0, 1)
        for lr in ("1e-5", "3e-5")
    ]


def test_a_sweep_of_one_run_has_its_name() -> None:
    assert runs_of("first", ["seed=3"]) == [SweptRun("first", ("seed=3",))]
    assert runs_of("first", []) == [SweptRun("first", ())]


def test_commas_within_brackets_and_quotes_divide_nothing() -> None:
    settings = ["optimizer.betas=[0.9,0.95],[0.9,0.99]", "data={a: 1, b: 'x,y'}", "sinks=['a,b']"]
    first, second = runs_of("s", settings)
    assert first == SweptRun("s-betas=0.9_0.95", ("optimizer.betas=[0.9,0.95]", *settings[1:]))
    assert second.name == "s-betas=0.9_0.99"


def test_keys_that_end_alike_have_more_parts_in_the_name() -> None:
    settings = ["agents.solver.optimizer.lr=1,2", "agents.critic.optimizer.lr=3,4", "rate.lr=5,6"]
    name = "s-solver.optimizer.lr=1-critic.optimizer.lr=3-rate.lr=5"
    assert runs_of("s", settings)[0].name == name
    assert runs_of("s", ["lr=1,2", "a.lr=3,4"])[0].name == "s-lr=1-a.lr=3"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["seed=0,,1"], "none empty"),
        (["seed=0,1,"], "none empty"),
        (["seed=1,1"], "each value once"),
        (["seed=0,1", "seed=2"], "seed is there twice"),
        (["recipe=a/b,a:b"], "two runs would be named s-recipe=a_b"),
    ],
)
def test_bad_settings_are_refused(settings: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        runs_of("s", settings)


values = st.lists(st.integers(0, 99).map(str), min_size=1, max_size=4, unique=True)


@given(st.lists(values, max_size=4))
def test_all_combinations_are_there_once(grid: list[list[str]]) -> None:
    runs = runs_of("s", [f"k{number}.v{number}={','.join(each)}" for number, each in enumerate(grid)])
    count = 1
    for each in grid:
        count *= len(each)
    assert len({run.settings for run in runs}) == len({run.name for run in runs}) == len(runs) == count
