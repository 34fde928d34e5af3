"""coder-tester: the small language, and the rewards of tests and drafts."""

import pytest

from flexmarl.actors.recipe.recipe import Recipe
from flexmarl.actors.workflow import Query
from flexmarl.launch.config.config_reading import recipe_folder, resolve
from flexmarl.launch.recipes.coder_tester.workflow import output, pass_share, passing, programs_left, workflow

from ..in_process import RunsHere
from .scripted import Scripted
from .text_pairs import text_pairs

QUERY = Query("q", "", {"program": "2m1", "input": "443", "drafts": 3})


@pytest.mark.parametrize(
    ("program", "digits", "results"),
    [("2m1", "010", "241"), ("2m1", "443", "514"), ("123", "444", "555"), ("ddd", "012", "024")],
)
def test_the_language(program: str, digits: str, results: str) -> None:
    assert output(program, digits) == results


def test_a_test_is_passed_by_the_pieces_with_the_same_results() -> None:
    assert passing("2", "4") == ["1", "2", "3", "d"]
    assert passing("2", "2") == ["2", "d"]
    assert passing("2", "20") == ["2"]
    assert programs_left("222", ["444"]) == 64
    assert programs_left("222", ["444", "200"]) == 2


def test_two_good_inputs_leave_one_program() -> None:
    assert all(programs_left(piece * 3, ["000", "111"]) == 1 for piece in "0123dm")


@pytest.mark.parametrize(
    ("draft", "share"),
    [("2m1", 1.0), ("2mm", 2 / 3), ("d1d", 0.0), ("", 0.0), ("2m", 0.0), ("2m1d", 0.0), ("2m=", 0.0)],
)
def test_a_draft_is_paid_for_each_digit_that_is_always_right(draft: str, share: float) -> None:
    assert pass_share(draft, "2m1") == share


async def test_a_draft_that_passes_the_tests_is_chosen_and_each_has_its_reward() -> None:
    tester, coder = Scripted("tester", "010"), Scripted("coder", "dm1", "2m1", "2m")
    rewards = (await workflow(QUERY, {"tester": tester, "coder": coder})).checked()
    assert tester.prompts == ["443>514;?"]
    assert coder.prompts == ["010>241;443>514;="] * 3
    assert {turn.sample_id: reward for turn, reward in rewards.turns} == {
        "coder-0": 2 / 3, "coder-1": 1.0, "coder-2": 0.0
    }  # fmt: skip
    assert rewards.by_agent == {"tester": 1 / programs_left("2m1", ["443", "010"])}
    assert rewards.metrics["accuracy"] == 1.0 and rewards.metrics["draft_accuracy"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("text", ["", "01", "0101", "500", "2m1"])
async def test_an_invalid_input_is_no_test(text: str) -> None:
    tester, coder = Scripted("tester", text), Scripted("coder", "2m1")
    rewards = (await workflow(QUERY, {"tester": tester, "coder": coder})).checked()
    assert coder.prompts == ["443>514;="] * 3
    assert rewards.metrics["invalid_tests"] == 1.0
    assert rewards.by_agent["tester"] == 1 / programs_left("2m1", ["443"])


def test_the_sft_writes_programs_that_pass_one_of_the_tests() -> None:
    recipe = Recipe(resolve("coder-tester", []).recipe_config())
    for prompt, program in text_pairs(recipe, "coder", 0, 64):
        tests = [test.split(">") for test in prompt.removesuffix(";=").split(";")]
        assert len(tests) == 2 and any(output(program, digits) == results for digits, results in tests)


async def test_a_policy_that_knows_one_test_alone_is_right_often_enough_to_learn() -> None:
    """At least 2 % of the answers after the SFT are right programs: reinforcement learning finds some to reward."""
    examples = Recipe(resolve("coder-tester", []).recipe_config()).eval_queries()
    chances = [1 / programs_left(query.data["program"], [query.data["input"]]) for query in examples]
    assert 0.02 < sum(chances) / len(chances) < 0.4


def test_the_tester_learns_in_a_short_run(runs_here: RunsHere) -> None:
    run = runs_here.train(
        "short", "training.steps=10", "training.queries_per_step=16", "data.eval_problems=10",
        "agent_defaults.sft.batches=80", "evaluation.every=0", "checkpoint.every=0",
        recipe=recipe_folder("coder-tester"),
    )  # fmt: skip
    assert run.status == 0 and not run.problems, run.text
    assert all(line["failed_trajectories"] == 0 for line in run.metrics)
    assert all(line["samples/coder"] == 3 * line["samples/tester"] == 192 for line in run.metrics)
    before, after = (
        sum(line["reward/tester"] for line in lines) / 4 for lines in (run.metrics[:4], run.metrics[-4:])
    )
    assert after > before + 0.05
