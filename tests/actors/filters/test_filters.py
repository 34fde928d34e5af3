"""Group filters: each on groups worked out by hand, and the whole list in its order."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.filters.contrast import Contrast
from flexmarl.actors.filters.equal_rewards import EqualRewards
from flexmarl.actors.filters.filter_config import FilterConfig
from flexmarl.actors.filters.group_filter import (
    Exclusion,
    FilterOptions,
    FinishedGroup,
    FinishedTurn,
    GroupFilter,
    apply_filters,
)
from flexmarl.actors.filters.near_duplicate import NearDuplicate
from flexmarl.actors.filters.overlong import Overlong
from flexmarl.actors.filters.users_filter import UsersFilter
from flexmarl.actors.messages import Query
from flexmarl.actors.names import AgentName
from flexmarl.actors.recipe.recipe import Recipe, RecipeConfig

SOLVER, JUDGE = AgentName("solver"), AgentName("judge")


def turn(
    number: int,
    tokens: Sequence[int] = (1, 2, 3),
    *,
    agent: AgentName = SOLVER,
    advantage: float = 1.0,
    truncated: bool = False,
    prompt: tuple[int, ...] = (9,),
) -> FinishedTurn:
    text = " ".join(map(str, tokens))
    sample_id = f"1:q_{int(agent == JUDGE)}_{number}"
    return FinishedTurn(sample_id, agent, number, prompt, tuple(tokens), text, truncated, 0.0, advantage)


def group(*turns: FinishedTurn) -> FinishedGroup:
    return FinishedGroup(Query("q", "2+2"), turns, {SOLVER: [0.0]}, {})


def left_out(options: FilterOptions, *turns: FinishedTurn) -> set[str]:
    exclusion = options.judge(group(*turns))
    return set() if exclusion is None else set(exclusion.sample_ids or ())


def test_equal_rewards_leave_out_the_agents_without_any_advantage() -> None:
    turns = [turn(0, advantage=0.0), turn(1, advantage=-0.5)]
    of_judge = [turn(number, agent=JUDGE, advantage=0.0) for number in range(2)]
    exclusion = EqualRewards().judge(group(*turns, *of_judge))
    assert exclusion == Exclusion("all rewards are equal: judge", frozenset({"1:q_1_0", "1:q_1_1"}))
    assert EqualRewards().judge(group(*turns)) is None


def test_overlong_turns_are_those_that_were_cut_or_that_have_too_many_tokens() -> None:
    turns = turn(0, (1, 2, 3, 4), truncated=True), turn(1, (1, 2, 3, 4)), turn(2, (1,) * 5)
    assert left_out(Overlong(), *turns) == {"1:q_0_0"}
    assert left_out(Overlong(tokens=4), *turns) == {"1:q_0_2"}
    assert left_out(Overlong(tokens=5), *turns) == set()


def test_a_near_duplicate_shares_most_runs_of_tokens_with_an_earlier_answer() -> None:
    base = (*range(12),)
    # 10 runs of three tokens each; the last token differs, so 9 of 11 are in both: 0.818.
    near = (*range(11), 99)
    turns = turn(0, base), turn(1, near), turn(2, (*range(50, 62),))
    assert left_out(NearDuplicate(similarity=0.81), *turns) == {"1:q_0_1"}
    assert left_out(NearDuplicate(similarity=0.82), *turns) == set()
    # Pairs of tokens: 10 of 12 are in both, 0.833.
    assert left_out(NearDuplicate(similarity=0.82, shingle=2), *turns) == {"1:q_0_1"}


def test_the_answer_that_stays_is_the_one_of_the_first_trajectory() -> None:
    turns = turn(2), turn(0), turn(1)
    assert left_out(NearDuplicate(similarity=1.0), *turns) == {"1:q_0_1", "1:q_0_2"}


@pytest.mark.parametrize(
    "other", [turn(1, advantage=-1.0), turn(1, prompt=(8,)), turn(1, agent=JUDGE), turn(1, (1, 2, 4))]
)
def test_answers_of_another_advantage_prompt_or_agent_are_no_duplicates(other: FinishedTurn) -> None:
    assert left_out(NearDuplicate(), turn(0), other) == set()


def test_answers_shorter_than_a_run_are_compared_whole() -> None:
    assert left_out(NearDuplicate(shingle=5), turn(0, (1, 2)), turn(1, (1, 2)), turn(2, (1,))) == {"1:q_0_1"}


def test_contrast_keeps_the_best_and_the_worst_trajectories_of_each_agent() -> None:
    """Trajectory 1 has two turns: its mean 0.25 is in the middle, though one of them is the greatest of all."""
    advantages = {0: [0.5], 1: [2.0, -1.5], 2: [-1.0], 3: [0.5], 4: [-0.5]}
    turns = [
        FinishedTurn(f"1:q_{place}_{number}", SOLVER, number, (9,), (1,), "", False, 0.0, advantage)
        for number, of_turns in advantages.items()
        for place, advantage in enumerate(of_turns)
    ]
    of_judge = [turn(number, agent=JUDGE, advantage=float(number)) for number in range(3)]
    middle = {"1:q_0_1", "1:q_1_1"}
    # Of the equal ones 0 and 3 the first is the best; the judge's trajectory 1 is between 0 and 2.
    assert left_out(Contrast(extremes=1), *turns) == middle | {"1:q_0_3", "1:q_0_4"}
    assert left_out(Contrast(extremes=2), *reversed(turns)) == middle
    assert left_out(Contrast(extremes=3), *turns) == set()
    apart = [replace(turn, sample_id=f"judge {turn.sample_id}") for turn in of_judge]
    assert left_out(Contrast(extremes=2), *turns, *apart) == middle
    assert left_out(Contrast(extremes=1), *apart) == {"judge 1:q_1_1"}


def test_a_filter_sees_the_rest_of_the_filters_before_it_and_each_sample_counts_once() -> None:
    turns = turn(0, truncated=True), turn(1), turn(2), turn(0, agent=JUDGE, advantage=0.0)
    options = Overlong(), NearDuplicate(), EqualRewards()
    rest, counts, reasons = apply_filters(group(*turns), [GroupFilter(o.label, o.judge) for o in options])
    assert [each.sample_id for each in rest.turns] == ["1:q_0_1"]
    assert counts == {"overlong": {SOLVER: 1}, "near_duplicate": {SOLVER: 1}, "equal_rewards": {JUDGE: 1}}
    assert reasons == [
        "1 turns ended at their greatest length",
        "1 answers nearly repeat another one of their group",
        "all rewards are equal: judge",
    ]


def test_behind_a_filter_that_drops_the_group_no_other_is_asked() -> None:
    def fail(of: FinishedGroup) -> Exclusion | None:
        raise AssertionError(of)

    filters = [GroupFilter("all", lambda of: Exclusion("enough")), GroupFilter("next", fail)]
    rest, counts, reasons = apply_filters(group(turn(0), turn(1)), filters)
    assert (rest.turns, counts, reasons) == ((), {"all": {SOLVER: 2}}, ["enough"])


# --------------------------------------------------------------------------- config


def test_an_entry_is_a_name_a_function_or_a_section() -> None:
    entry: TypeAdapter[FilterConfig] = TypeAdapter(FilterConfig)
    assert entry.validate_python("overlong") == Overlong()
    assert entry.validate_python({"name": "overlong", "tokens": 5}) == Overlong(tokens=5)
    for written in ("fn.py:keep", {"function": "fn.py:keep"}):
        assert entry.validate_python(written) == UsersFilter(function="fn.py:keep")
    assert UsersFilter(function="fn.py:keep").label == "keep"


# --------------------------------------------------------------------------- a user's function


WORKFLOW = """
async def workflow(query, agents): ...
def train_query(position, seed): ...
def eval_queries(seed): ...
"""


def recipe_with(folder: Path, function: str) -> Recipe:
    (folder / "workflow.py").write_text(WORKFLOW)
    (folder / "own.py").write_text(f"from flexmarl.actors import Exclusion\n\n{function}\n")
    return Recipe(RecipeConfig(folder=str(folder), data={}, seed=0))


@pytest.mark.parametrize(
    ("body", "exclusion"),
    [
        ("return None", None),
        ("return ''", None),
        ("return f'{len(group.turns)} of {group.query.id}'", Exclusion("1 of q")),
        ("return Exclusion('x', frozenset({'1:q_0_0'}))", Exclusion("x", frozenset({"1:q_0_0"}))),
    ],
)
def test_a_function_drops_keeps_or_names_samples(
    tmp_path: Path, body: str, exclusion: Exclusion | None
) -> None:
    judge = UsersFilter(function="own.py:fn").load(recipe_with(tmp_path, f"def fn(group):\n    {body}"))
    assert judge(group(turn(0))) == exclusion


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("def fn(group):\n    return 3", "filter own.py:fn returns int: a text drops the group"),
        ("def fn(group):\n    return group.nothing", "(?s)own.py:fn failed: AttributeError: .*own.py"),
        ("async def fn(group):\n    return None", "filter own.py:fn is async: write def"),
        ("def other(group):\n    return None", "filter own.py:fn: own.py has no function 'fn'"),
        ("import no_such_module_at_all", "filter own.py:fn: ModuleNotFoundError"),
    ],
)
def test_a_function_that_does_not_fit_is_named(tmp_path: Path, function: str, problem: str) -> None:
    recipe = recipe_with(tmp_path, function)
    with pytest.raises(RecipeError, match=problem):
        UsersFilter(function="own.py:fn").load(recipe)(group(turn(0)))
