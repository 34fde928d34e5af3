"""coding-harness: the tests, the harness and its rewards, and the program as a trajectory."""

import re
from random import Random
from typing import Any

import pytest

from flexmarl.actors.recipe.recipe import Recipe
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.recipes.coding_harness.harness import repair, review, value
from flexmarl.launch.recipes.coding_harness.workflow import draw, workflow

from ...actors.gateway.scripted_agents import ScriptedAgent
from .text_pairs import text_pairs


class FakeClient:
    """Gives answers in order. Keeps the messages that it was asked with."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[list[dict[str, str]]] = []

    def ask(self, model: str, messages: list[dict[str, str]]) -> str:
        self.asked.append([*messages])
        return self.answers.pop(0)


def test_expressions_have_three_operators() -> None:
    assert [value(text) for text in ("37*4", "37+4", "3-9")] == [148, 41, -6]
    assert [value(text) for text in ("37", "37**4", "a+b", "__import__('os')", "")] == [None] * 5


def test_a_right_repair_ends_at_its_first_attempt() -> None:
    assert repair(FakeClient("37*4"), "37+4!148") == ([1.0], "148")


def test_a_wrong_repair_has_its_result_and_a_second_attempt() -> None:
    client = FakeClient("37-4", "4*37")
    assert repair(client, "37+4!148") == ([0.0, 0.0], "148"), "the numbers are others"
    assert client.asked[1][1:] == [
        {"role": "assistant", "content": "37-4"},
        {"role": "user", "content": "33"},
    ]


@pytest.mark.parametrize(
    ("result", "verdict", "reward"), [("148", "ok", 1.0), ("33", "ok", 0.0), ("", "no", 1.0), ("33", "", 0.0)]
)
def test_a_verdict_is_right_or_not(result: str, verdict: str, reward: float) -> None:
    assert review(FakeClient(verdict), result, "148") == reward


def test_another_operator_repairs_each_test() -> None:
    random = Random(0)
    for _ in range(100):
        failing, _, target = draw(random, held_out=False).partition("!")
        a, b = re.split(r"[-+*]", failing)
        assert str(value(failing)) != target
        assert target in [str(value(f"{a}{sign}{b}")) for sign in "+-*"]


def test_tests_of_the_evaluation_are_never_trained_on() -> None:
    recipe = Recipe(resolve("coding-harness", []).recipe_config())
    held_out = {test for query in recipe.eval_queries() for test in query.data["tests"]}
    trained = {test for position in range(500) for test in recipe.train_query(position).data["tests"]}
    assert held_out.isdisjoint(trained)
    assert held_out.isdisjoint(
        prompt[6:].partition("<eos>")[0] for prompt, _ in text_pairs(recipe, "fixer", 0, 500)
    )


async def test_the_program_plays_a_trajectory() -> None:
    query = Recipe(resolve("coding-harness", ["data.tests=1"]).recipe_config()).train_query(0)
    fixer, reviewer = ScriptedAgent("fixer", "1", "2"), ScriptedAgent("reviewer", "no")
    agents: Any = {"fixer": fixer, "reviewer": reviewer}
    rewards = await workflow(query, agents)
    assert [(turn.text, reward) for turn, reward in rewards.turns] == [("1", 0.0), ("2", 0.0), ("no", 1.0)]
    assert rewards.metrics == {"accuracy": 0.0, "first_attempts": 0.0, "reviews": 1.0}
    assert fixer.prompts[1][1:] == [{"role": "user", "content": "no"}], "its conversation continues"
