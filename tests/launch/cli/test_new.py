"""``flexmarl new``: a copy of a built-in recipe to change."""

from pathlib import Path

import pytest

from flexmarl.actors.recipe.recipe import Recipe
from flexmarl.launch.cli.main import main
from flexmarl.launch.cli.new import recipe_names
from flexmarl.launch.config.config_reading import recipe_folder, resolve


@pytest.mark.parametrize("name", recipe_names())
def test_a_copy_is_a_recipe_that_needs_no_other_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, settings = tmp_path / "mine", []
    if name == "math-debate":  # its questions are on a hub
        (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
        settings = [f"data.dataset={tmp_path}"]
    assert main(["new", str(folder), "--like", name]) == 0
    assert f"flexmarl train {folder} --dry-run" in capsys.readouterr().out
    assert not [*folder.rglob("__pycache__")]
    mine, built_in = resolve(str(folder), settings), resolve(name, settings)
    assert Path(mine.recipe) == folder
    assert all(
        not Path(policy.real_model.tokenizer_source).is_relative_to(recipe_folder(name))
        for policy in mine.policies.values()
    )
    copied, original = Recipe(mine.recipe_config()), Recipe(built_in.recipe_config())
    assert copied.train_query(3) == original.train_query(3)


def test_plan_path_is_copied_if_no_recipe_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["new", str(tmp_path / "empty")]) == 0
    copied = (tmp_path / "empty" / "workflow.py").read_text()
    assert copied == (recipe_folder("plan-path") / "workflow.py").read_text()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_nothing_is_overwritten(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine"
    if kind == "folder":
        mine.mkdir()
    kept = mine / "notes" if kind == "folder" else mine
    kept.write_text("mine")
    assert main(["new", str(mine)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert kept.read_text() == "mine" and [*tmp_path.rglob("workflow.py")] == []


@pytest.mark.parametrize("name", ["shared-sort", "nothing"])
def test_a_recipe_that_can_not_be_copied_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer of shared-sort is that of sort-digits: a copy of its folder would not be whole."""
    assert main(["new", str(tmp_path / "mine"), "--like", name]) == 2
    assert "plan-path, sort-digits" in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "--help"]) == 0
    assert "flexmarl new my-recipe --like tool-math" in capsys.readouterr().out
