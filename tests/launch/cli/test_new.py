"""``flexmarl new``: a copy of a built-in recipe to change."""

import json
from pathlib import Path

import pytest

from flexmarl.actors.recipe.recipe import Recipe
from flexmarl.launch.cli.main import main
from flexmarl.launch.cli.new import recipe_names, skeleton_names
from flexmarl.launch.config.config_reading import recipe_folder, resolve

from ..in_process import actors_in_tasks


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


def test_a_few_lines_are_copied_if_no_recipe_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["new", str(tmp_path / "empty")]) == 0
    lines = [
        line
        for name in ("workflow.py", "config.yaml")
        for line in (tmp_path / "empty" / name).read_text().splitlines()
        if line.strip()
    ]
    assert len(lines) <= 30
    query = Recipe(resolve(str(tmp_path / "empty"), []).recipe_config()).train_query(0)
    assert query.text.endswith("=") and query.data["answer"] in query.text


@pytest.mark.parametrize("name", skeleton_names())
def test_a_skeleton_trains_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its real models for a few steps: the curves are those of launch/docs/workflows.md."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine", "--like", name]) == 0
    few = ["training.steps=2", "training.trajectories_per_query=4", "training.micro_batch=16"]
    few += ["agent_defaults.sft.batches=2"] if name == "chat" else []
    with actors_in_tasks():
        assert main(["train", "mine", "--name", "first", *few]) == 0
    run = tmp_path / "runs" / "first"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert [step["step"] for step in steps if "step" in step][-1] == 2
    assert "trajectory_failed" not in kinds and "evaluated" in kinds
    assert kinds.count("sft_done") == (2 if name == "chat" else 0)


def test_a_recipe_with_the_task_of_another_is_copied_with_its_code(tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "mine"), "--like", "shared-sort"]) == 0
    copied = (tmp_path / "mine" / "workflow.py").read_text()
    assert copied == (recipe_folder("sort-digits") / "workflow.py").read_text()
    assert "../" not in (tmp_path / "mine" / "config.yaml").read_text()


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


def test_a_recipe_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", str(tmp_path / "mine"), "--like", "plan-pth"]) == 2
    refusal = capsys.readouterr().err
    assert "there are: chat, minimal, " in refusal and "do you mean plan-path?" in refusal
    assert not (tmp_path / "mine").exists()


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "--help"]) == 0
    assert "flexmarl new my-recipe --like tool-math" in capsys.readouterr().out


def test_the_next_commands_can_be_copied_also_with_a_space_in_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", str(tmp_path / "my recipe")]) == 0
    assert f"flexmarl train '{tmp_path}/my recipe' --dry-run" in capsys.readouterr().out
