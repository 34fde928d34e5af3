"""The recipe of the page about environments: chat messages, a tool, rewards of turns and an environment class, in a few
lines."""

import asyncio
import re
from pathlib import Path
from typing import Any

from flexmarl.actors.environments.tool_calls import tool_schema
from flexmarl.actors.recipe.recipe import Recipe, RecipeConfig
from flexmarl.actors.workflow import Rewards, Turn

PAGE = Path(__file__).parents[2] / "launch" / "docs" / "environments.md"
MOST_LINES = 60
DATA = {"largest": 10, "calls": 3}


def block(file: str) -> str:
    found = re.search(
        rf"^```\w+\n# {re.escape(file)}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found is not None
    return found[1]


class Student:
    """Gives the answers of a list. Keeps the messages that it was asked with."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []

    async def generate(self, prompt: Any, *, tools: Any) -> Turn:
        self.asked.append(prompt)
        schemas = tuple(tool_schema(tool) for tool in tools)
        return Turn("student", self.answers.pop(0), (), (), tools=schemas)


def test_a_recipe_with_all_of_it_is_short_and_right(tmp_path: Path) -> None:
    code = block("sums/workflow.py")
    assert len(code.splitlines()) + len(block("sums/config.yaml").splitlines()) < MOST_LINES
    (tmp_path / "workflow.py").write_text(code)
    recipe = Recipe(RecipeConfig(folder=str(tmp_path), data=DATA, seed=0))
    query = recipe.train_query(0)
    a, b = (int(number) for number in re.findall(r"\d+", query.text))
    call = f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    wrong = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    student: Any = Student(wrong, call, str(a + b))

    async def played() -> Rewards:
        await recipe.setup(10.0)
        return await recipe.workflow(query, {"student": student})

    rewards = asyncio.run(played())
    assert rewards.by_agent == {"student": 1.0} and rewards.metrics == {"accuracy": 1.0}
    assert [(turn.text, reward) for turn, reward in rewards.turns] == [(call, 0.1)]
    assert student.asked[1][1]["content"].startswith("error: ValueError: a: Missing required argument")
    assert student.asked[2][1] == {"role": "tool", "name": "add", "content": str(a + b)}
