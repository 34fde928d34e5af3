"""A recipe's code: found, loaded, and reported with the line at which it fails."""

from pathlib import Path

import pytest

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.messages.rollouts import Query
from flexmarl.actors.recipe.recipe import Recipe, RecipeConfig
from flexmarl.actors.recipe.sources.variance_source import VarianceConfig

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
    assert not recipe.defines("sft")


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


HALVES = r"""
def train_query(position, seed, **data):
    return Query("q\ud83d" if position == 3 else "q", "x")

def eval_queries(seed, **data):
    return [Query("a", "x"), Query("b", "x", {"notes": ["\ud83d"]})]

def sft(agent, batch, size, seed, **data):
    return [("a", "b"), ("a", "b\ud83d" if batch else "b")]
"""


def test_half_of_a_character_is_named_with_its_place(tmp_path: Path) -> None:
    recipe = load(tmp_path, WHOLE + HALVES)
    assert recipe.train_query(2).id == "q"
    assert recipe.sft("solver", 0, 2) == [("a", "b"), ("a", "b")]
    half = "half of a surrogate pair, which UTF-8 lacks"
    for call, words in (
        (
            lambda: recipe.train_query(3),
            r"train_query(3, seed) gives the query 'q\ud83d', which can't be sent to another process: "
            rf"id is 'q\ud83d': {half}",
        ),
        (
            recipe.eval_queries,
            "query 1 of eval_queries gives the query 'b', which can't be sent to another process: "
            rf"data.notes[0] is '\ud83d': {half}",
        ),
        (
            lambda: recipe.sft("solver", 7, 2),
            rf"sft gives example 1 of batch 7 for agent solver whose completion is 'b\ud83d': {half}",
        ),
    ):
        with pytest.raises(RecipeError) as refused:
            call()
        assert str(refused.value) == f"workflow.py: {words}"


@pytest.mark.parametrize("found", ["None", "Query(1, 'x')", "Query('q', 'x', {'f': open})"])
def test_a_query_that_is_none_is_refused_at_each_position(tmp_path: Path, found: str) -> None:
    recipe = load(tmp_path, f"{WHOLE}\ndef train_query(position, seed, **data): return {found}")
    with pytest.raises(RecipeError, match=r"workflow.py: train_query\(5, seed\) gives "):
        recipe.train_query(5)


def test_an_error_whose_text_holds_half_of_a_character_is_shown(tmp_path: Path) -> None:
    recipe = load(tmp_path, f"{WHOLE}\ndef train_query(position, seed, **data): raise ValueError('\\ud83d')")
    with pytest.raises(RecipeError, match=r"train_query failed: ValueError: \\ud83d") as refused:
        recipe.train_query(0)
    str(refused.value).encode()


def test_a_recipe_with_a_source_of_its_own_and_another_in_the_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "workflow.py").write_text(
        WHOLE + "\ndef query_source(positions, seed, **data): return positions\n"
    )
    config = RecipeConfig(folder=str(tmp_path), data={}, seed=0, query_source=VarianceConfig())
    with pytest.raises(
        RecipeError, match=r"defines query_source, and .* query_source.name=variance: leave one of"
    ):
        Recipe(config)


def test_no_recipe_at_all(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not exist: a recipe is a folder with"):
        Recipe(RecipeConfig(folder=str(tmp_path), data={}, seed=0))


@pytest.mark.parametrize("code", ["def broken(:", "async def workflow(query, agents): ...\nawait x"])
def test_a_file_that_is_no_python_shows_its_own_line_alone(tmp_path: Path, code: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load(tmp_path, code)
    head, place, *_ = str(refused.value).splitlines()
    assert "loading failed: SyntaxError" in head and place.startswith(
        f'  File "{tmp_path}/workflow.py", line'
    )
    assert "importlib" not in str(refused.value) and "module_of" not in str(refused.value)


def test_all_frames_are_shown_if_the_config_says_so(tmp_path: Path) -> None:
    (tmp_path / "workflow.py").write_text("import nowhere_at_all")
    config = RecipeConfig(folder=str(tmp_path), data={}, seed=0, whole_tracebacks=True)
    with pytest.raises(RecipeError, match="in module_of"):
        Recipe(config)
