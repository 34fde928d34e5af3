"""Durable files: JSON that is whole or named, folders that reach the disk."""

from pathlib import Path

import pytest

from flexmarl.core.durable.files import read_json, sync_folder, write_json
from flexmarl.core.errors import CheckpointIncomplete


def test_json_comes_back(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"version": 3, "names": ["a"]})
    assert read_json(tmp_path / "a.json") == {"version": 3, "names": ["a"]}


@pytest.mark.parametrize("text", ['{"version": ', "", "[1]"])
def test_torn_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(CheckpointIncomplete, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_syncing_reaches_every_file_and_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("a", "inner/b"):
        (tmp_path / name).write_text("x")
    opened: dict[int, Path] = {}
    synced: list[Path] = []
    real_open = __import__("os").open

    def record_open(path: Path, flags: int) -> int:
        descriptor: int = real_open(path, flags)
        opened[descriptor] = Path(path)
        return descriptor

    monkeypatch.setattr("flexmarl.core.durable.files.os.open", record_open)
    monkeypatch.setattr("flexmarl.core.durable.files.os.fsync", lambda fd: synced.append(opened[fd]))
    sync_folder(tmp_path)
    assert set(synced) == {tmp_path, tmp_path / "a", tmp_path / "inner", tmp_path / "inner/b"}
    assert synced[-1] == tmp_path
