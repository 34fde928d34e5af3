"""countdown: right answers, the judge's prompt, and a reward for each draft."""

from random import Random

import pytest

from flexmarl.actors.workflow import Query
from flexmarl.launch.recipes.countdown.workflow import (
    draw,
    eval_queries,
    example,
    is_right,
    right_answers,
    sft,
    train_query,
    workflow,
)

from .scripted import Scripted

DATA = {"eval_problems": 50}


def test_right_answers_add_two_of_the_numbers() -> None:
    assert right_answers("3528=7") == ["5+2", "2+5"]
    assert right_answers("3528=10") == ["2+8", "8+2"]
    assert right_answers("9871=9") == ["8+1", "1+8"]


@pytest.mark.parametrize("wrong", ["4+3", "3+5", "5+", "", "5+2+", "7"])
def test_an_answer_is_wrong_with_a_foreign_number_another_sum_or_another_form(wrong: str) -> None:
    assert not is_right(wrong, "3528=7")


async def test_each_draft_has_its_own_reward_and_the_judge_sees_all() -> None:
    proposer = Scripted("proposer", "5+2", "3+5", "2+5", "88")
    agents = {"proposer": proposer, "judge": Scripted("judge", "2+5")}
    rewards = (await workflow(Query("q", "3528=7"), agents)).checked()
    assert proposer.prompts == ["528=7", "328=7", "358=7", "352=7"]
    assert agents["judge"].prompts == ["5+2,3+5,2+5,88?3528=7"]
    assert [reward for _, reward in rewards.turns] == [1.0, 0.0, 1.0, 0.0]
    assert rewards.by_agent == {"judge": 1.0}
    assert rewards.metrics == {
        "accuracy": 1.0, "draft_accuracy": 0.5, "any_draft": 1.0,
        "draft_1": 1.0, "draft_2": 0.0, "draft_3": 1.0, "draft_4": 0.0,
    }  # fmt: skip


async def test_a_judge_that_is_wrong_gets_nothing_for_right_drafts() -> None:
    agents = {"proposer": Scripted("proposer", "5+2"), "judge": Scripted("judge", "5+3")}
    rewards = (await workflow(Query("q", "3528=7"), agents)).checked()
    assert rewards.by_agent == {"judge": 0.0} and rewards.metrics["any_draft"] == 1.0


def test_every_problem_has_an_answer() -> None:
    random = Random(1)
    assert all(right_answers(draw(random, held_out)) for held_out in (True, False) for _ in range(200))


def test_numbers_and_targets_of_the_evaluation_are_not_trained_on_in_any_order() -> None:
    def unordered(text: str) -> tuple[str, str]:
        numbers, target = text.split("=")
        return "".join(sorted(numbers)), target

    held_out = {unordered(query.text) for query in eval_queries(0, **DATA)}
    trained = {unordered(train_query(position, 0, **DATA).text) for position in range(2000)}
    trained |= {unordered(prompt) for prompt, _ in sft("proposer", 0, 500, 0, **DATA)}
    assert held_out.isdisjoint(trained)


def test_the_warm_up_has_right_and_wrong_answers() -> None:
    """Seven tenths are right on purpose; any two of four numbers are right too, in a sixth of the cases or more."""
    random = Random(2)
    problems = [draw(random, held_out=False) for _ in range(1000)]
    share = sum(is_right(example(problem, random), problem) for problem in problems) / len(problems)
    assert 0.7 < share < 0.85
