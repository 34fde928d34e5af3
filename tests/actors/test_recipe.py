"""A recipe's code: found, loaded, and reported with the line at which it fails."""

from pathlib import Path

import pytest

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.recipe import Recipe, RecipeConfig
from flexmarl.actors.workflow import Query

WHOLE = """
from flexmarl.actors.workflow import Query

async def workflow(query, agents): ...

def train_query(position, seed, **data):
    return Query(f"q{position}", data["text"])

def eval_queries(seed, **data):
    return []
"""


def load(folder: Path, code: str, **data: object) -> Recipe:
    (folder / "workflow.py").write_text(code)
    return Recipe(RecipeConfig(folder=str(folder), data=data, seed=0))


def test_data_reaches_the_functions(tmp_path: Path) -> None:
    recipe = load(tmp_path, WHOLE, text="x")
    assert recipe.train_query(3) == Query("q3", "x") and recipe.eval_queries() == []
    assert not recipe.has_sft


def test_a_recipe_may_have_modules_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "flexmarl_test_rewards.py").write_text("BEST = 3.0\n")
    recipe = load(tmp_path, f"from flexmarl_test_rewards import BEST\n{WHOLE}", text="x")
    assert recipe.train_query(0).text == "x"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def broken(:", r"loading failed: SyntaxError(.|\n)*workflow\.py\", line 1"),
        ("import nowhere_at_all", r"loading failed: ModuleNotFoundError(.|\n)*line 1"),
        ("x = 1", "defines no function 'workflow'"),
    ],
)
def test_a_recipe_that_does_not_load_says_where(tmp_path: Path, code: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        load(tmp_path, code)


def test_a_function_that_fails_says_where(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"train_query failed: KeyError: 'text'(.|\n)*line 7, in train_query"
    ):
        load(tmp_path, WHOLE).train_query(0)


def test_no_recipe_at_all(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not exist: a recipe is a folder with"):
        Recipe(RecipeConfig(folder=str(tmp_path), data={}, seed=0))
