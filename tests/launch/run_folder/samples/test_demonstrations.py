"""Demonstrations of a run's own successes: the choice, and the trajectories that can't be one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.messages import Query
from flexmarl.actors.recorded_trajectory import RecordedTrajectory
from flexmarl.launch.errors import InvalidCondition, NoDemonstration
from flexmarl.launch.run_folder.samples.conditions import FigureCondition
from flexmarl.launch.run_folder.samples.demonstrations import Written, write_demonstrations
from flexmarl.launch.run_folder.samples.reader import Samples

from .files import record, recorded_run, trajectory


def walk(
    number: int, reward: float, *texts: str, step: int = 1, query: str = "q", **changes: Any
) -> RecordedTrajectory:
    """A trajectory of the solver alone."""
    one = trajectory(step, 1, number, reward)
    turns = tuple(one.turns[0]._replace(number=place, text=text) for place, text in enumerate(texts))
    return one._replace(query=Query("q1", query), rewards={"solver": reward}, turns=turns, **changes)


def written(
    folder: Path,
    *trajectories: RecordedTrajectory,
    config: str = "rollout: {}",
    success: str = "reward>=1",
    **filters: Any,
) -> tuple[Written, dict[str, Any]]:
    """The figures, and the actions by query."""
    # One record for each: a file has one for each step and query.
    records = [
        record(one._replace(query=replace(one.query, id=f"q{place}")))
        for place, one in enumerate(trajectories)
    ]
    run = recorded_run(folder / "run", records, config)
    file = folder / "walks.jsonl"
    with Samples(run.path) as samples:
        figures = write_demonstrations(samples, file, FigureCondition.of(success), **filters)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [*file.parent.glob(".*")] == []
    return figures, {line["query"]: line["actions"] for line in lines}


def test_a_query_has_its_highest_reward_and_of_these_the_fewest_turns_and_of_these_the_newest(
    tmp_path: Path,
) -> None:
    figures, actions = written(
        tmp_path,
        walk(0, 1.0, "U", "D", "U"),
        walk(1, 2.0, "U", "L"),
        walk(2, 2.0, "a", "b", step=2),
        walk(3, 2.0, "U", "L", "R", step=3),
        walk(4, 1.5, "R", step=4),
        walk(5, 0.5, "x", query="lost"),
        walk(6, 1.0, "z", query="p"),
    )
    assert actions == {"p": {"solver": ["z"]}, "q": {"solver": ["a", "b"]}} and [*actions] == ["p", "q"]
    assert figures == Written(2, 6, 7, {})


def test_reasoning_is_left_out_and_calls_stay(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "press", "arguments": {}}</tool_call>'
    _, actions = written(tmp_path, walk(0, 1.0, f"<think>x</think>\nNow. {call}", " as it was "))
    assert actions == {"q": {"solver": [f"Now. {call}", " as it was "]}}


def test_a_success_may_be_a_metric(tmp_path: Path) -> None:
    good, bad = walk(0, 0.1, "a"), walk(1, 0.9, "b")
    metrics = ({"accuracy": 1.0}, {"accuracy": 0.0})
    trajectories = [one._replace(metrics=each) for one, each in zip((good, bad), metrics, strict=True)]
    assert written(tmp_path, *trajectories, success="accuracy = 1")[1] == {"q": {"solver": ["a"]}}


def test_trajectories_that_no_run_can_follow_are_left_out_by_their_reason(tmp_path: Path) -> None:
    figures, actions = written(
        tmp_path,
        walk(0, 1.0, "a"),
        walk(1, 3.0),
        walk(2, 3.0, "a", ""),
        walk(3, 3.0, "<think>and then</think>"),
        walk(4, 3.0, "\ud83d"),
        walk(5, 3.0, "b", metrics={"followed": 0.5}),
        config="rollout: {demonstrations: {file: walks.jsonl}}",
    )
    assert actions == {"q": {"solver": ["a"]}}
    assert figures.left_out == {
        "with an answer that is empty": 3,
        "with text that UTF-8 lacks": 1,
        "along a demonstration already, with actions of another origin": 1,
    }


def test_a_metric_of_the_same_name_is_no_demonstration(tmp_path: Path) -> None:
    assert written(tmp_path, walk(0, 1.0, "b", metrics={"followed": 0.5}))[1] == {"q": {"solver": ["b"]}}


def test_trees_are_none_and_evaluations_of_their_run_are_lines(tmp_path: Path) -> None:
    config = "rollout: {tree: {branch: greedy}}"
    _, actions = written(tmp_path, walk(0, 2.0, "a", "b"), walk(1, 1.0, "e", evaluation=True), config=config)
    assert actions == {"q": {"solver": ["e"]}}
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(
        NoDemonstration, match="none of 1 trajectories of .* left out: 1 a tree, which has several"
    ):
        written(other, walk(0, 2.0, "a"), config=config)
    assert not (other / "walks.jsonl").exists()


def test_filters_choose_first(tmp_path: Path) -> None:
    trajectories = [walk(0, 2.0, "a"), walk(1, 1.0, "b", step=2), walk(2, 3.0, "c", step=3, failure="lost")]
    figures, actions = written(tmp_path, *trajectories, step=">1")
    assert actions == {"q": {"solver": ["b"]}} and figures.trajectories == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("reward>=1", "reward >= 1"),
        (">0.5", "reward > 0.5"),
        ("1", "reward = 1"),
        ("0.5-0.75", "reward BETWEEN 0.5 AND 0.75"),
        (" f1 score <= 2e-1", "f1 score <= 0.2"),
        ("accuracy==1", "accuracy == 1"),
        ("a!=1", "a != 1"),
    ],
)
def test_conditions_on_figures(text: str, shown: str) -> None:
    assert str(FigureCondition.of(text)) == shown


@pytest.mark.parametrize(
    ("text", "fits"),
    [("<1", {0.5}), ("<=1", {0.5, 1.0}), ("=1", {1.0}), ("!=1", {0.5, 2.0}), (">1", {2.0}), (">=1", {1.0, 2.0}),
     ("1-2", {1.0, 2.0}), ("==1", {1.0})],
)  # fmt: skip
def test_a_condition_holds_of_numbers(text: str, fits: set[float]) -> None:
    condition = FigureCondition.of(text).condition
    assert {number for number in (0.5, 1.0, 2.0) if condition.holds(number)} == fits


@pytest.mark.parametrize("text", ["", "accuracy", "accuracy>=", "accuracy>>1", "accuracy>=high", ">=1>=2"])
def test_other_texts_are_no_conditions(text: str) -> None:
    with pytest.raises(InvalidCondition, match="is not a condition: write 'reward>=1', 'accuracy=1'"):
        FigureCondition.of(text)
