"""Joint checkpoints on disk: whole or not there, checked when they are taken again."""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from flexmarl.actors.errors import CheckpointIncomplete
from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.orchestrator import checkpoint
from flexmarl.actors.orchestrator.checkpoint import RunState
from flexmarl.actors.orchestrator.queries.queries_state import QueriesState


def gathered(root: Path, step: int) -> RunState:
    """The files that two policies' saves leave for ``commit``."""
    for agent in ("sorter", "checker"):
        folder = checkpoint.partial_folder(root, Step(step)) / agent
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(os.urandom(200))
    versions = {PolicyName(name): Version(step) for name in ("sorter", "checker")}
    queries = QueriesState(
        step * 16, {"position": step * 16, "digests": ["ab"]}, {"levels": [1, 0.1, None]}, "c"
    )
    return RunState(Step(step), versions, {0: {"accuracy": 0.25}}, queries)


def test_what_is_committed_comes_back(tmp_path: Path) -> None:
    state = gathered(tmp_path, 7)
    folder = checkpoint.commit(tmp_path, state, keep=2)
    assert checkpoint.complete(tmp_path) == [folder]
    assert checkpoint.load(folder) == state


def test_one_of_another_format_is_refused(tmp_path: Path) -> None:
    """Its queries would be read as none, and the run would begin with the first again."""
    folder = checkpoint.commit(tmp_path, replace(gathered(tmp_path, 7), format=3), keep=2)  # type: ignore[arg-type]
    with pytest.raises(CheckpointIncomplete, match=r"run\.json.*format: Input should be 4"):
        checkpoint.load(folder)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for step in (9, 10, 100, 1_000_000):
        checkpoint.commit(tmp_path, gathered(tmp_path, step), keep=2)
    assert [checkpoint.load(folder).step for folder in checkpoint.complete(tmp_path)] == [100, 1_000_000]


def test_everything_is_on_the_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = gathered(tmp_path, 3)
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def record_rename(path: Path, target: Path) -> Path:
        done.append("RENAME")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    checkpoint.commit(tmp_path, state, keep=1)
    before = done[: done.index("RENAME")]
    assert before.count("model.safetensors") == 2
    assert {"run.json", "manifest.json", "sorter", "checker"} <= set(before)
    assert done[-1] == tmp_path.name, "the new name itself"


def test_a_checkpoint_that_was_not_committed_is_none(tmp_path: Path) -> None:
    gathered(tmp_path, 5)
    assert checkpoint.complete(tmp_path) == []
    checkpoint.remove_partial(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["sorter/model.safetensors", "run.json", "manifest.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = checkpoint.commit(tmp_path, gathered(tmp_path, 5), keep=1)
    (folder / name).unlink()
    with pytest.raises(CheckpointIncomplete, match=f"{name}: the file is missing"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    ("position", "problem"), [(0, "is damaged"), (None, "has 199 bytes, 200 were written")]
)
def test_a_changed_file_is_named(tmp_path: Path, position: int | None, problem: str) -> None:
    folder = checkpoint.commit(tmp_path, gathered(tmp_path, 5), keep=1)
    path = folder / "checker" / "model.safetensors"
    content = bytearray(path.read_bytes())
    if position is None:
        content.pop()
    else:
        content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointIncomplete, match=f"checker/model.safetensors: {problem}"):
        checkpoint.load(folder)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("damage", ["a flipped bit", "cut short"])
def test_a_damaged_manifest_is_named(tmp_path: Path, seed: int, damage: str) -> None:
    folder = checkpoint.commit(tmp_path, gathered(tmp_path, 5), keep=1)
    path = folder / "manifest.json"
    content = bytearray(path.read_bytes())
    position = random.Random(seed).randrange(8 * len(content))
    if damage == "cut short":
        del content[-1 if seed == 0 else position // 8 :]
    else:
        content[position // 8] ^= 1 << position % 8
    path.write_bytes(content)
    for read in (checkpoint.load, checkpoint.policies):
        with pytest.raises(CheckpointIncomplete, match="manifest.json: "):
            read(folder)


def test_a_manifest_that_says_the_same_in_another_text_is_refused(tmp_path: Path) -> None:
    folder = checkpoint.commit(tmp_path, gathered(tmp_path, 5), keep=1)
    path = folder / "manifest.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(CheckpointIncomplete, match="manifest.json: is damaged"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    "name",
    ["sorter/model.safetensors", "sorter/config.json", "sorter", "other", "run.json", "manifest.json"],
)
def test_a_link_is_named_and_not_followed(tmp_path: Path, name: str) -> None:
    """A listed file, an unlisted one, a policy's folder: what the link leads to is the file that was written."""
    folder = checkpoint.commit(tmp_path, gathered(tmp_path, 5), keep=1)
    path, elsewhere = folder / name, tmp_path / "elsewhere"
    if path.exists():
        path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(CheckpointIncomplete, match=f"{name}: is a link to .*elsewhere"):
        checkpoint.load(folder)


@pytest.mark.parametrize("name", ["notes", "sorter/adapter_config.json"])
def test_a_file_that_was_added_is_named(tmp_path: Path, name: str) -> None:
    folder = checkpoint.commit(tmp_path, gathered(tmp_path, 5), keep=1)
    (folder / name).write_text("{}")
    with pytest.raises(CheckpointIncomplete, match=f"{name}: is not part of the checkpoint"):
        checkpoint.load(folder)


def test_a_pipe_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    folder = checkpoint.commit(tmp_path, gathered(tmp_path, 5), keep=1)
    (folder / "run.json").unlink()
    os.mkfifo(folder / "run.json")
    with pytest.raises(CheckpointIncomplete, match=r"run.json: is neither a file nor a folder"):
        checkpoint.load(folder)


def test_files_of_other_policies_do_not_count(tmp_path: Path) -> None:
    folder = checkpoint.commit(tmp_path, gathered(tmp_path, 5), keep=1)
    (folder / "sorter" / "notes").write_text("mine")
    assert checkpoint.policies(folder) == {"sorter", "checker"}
    checkpoint.check_files(folder, PolicyName("checker"))
    with pytest.raises(CheckpointIncomplete, match="sorter/notes"):
        checkpoint.check_files(folder, PolicyName("sorter"))


def test_a_link_that_a_save_left_is_not_committed(tmp_path: Path) -> None:
    state = gathered(tmp_path, 5)
    (checkpoint.partial_folder(tmp_path, Step(5)) / "sorter" / "config.json").symlink_to(
        tmp_path / "config.json"
    )
    with pytest.raises(CheckpointIncomplete, match=r"sorter/config.json: is a link"):
        checkpoint.commit(tmp_path, state, keep=1)
    assert checkpoint.complete(tmp_path) == []
