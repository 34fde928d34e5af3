"""Folders that reach the disk."""

from pathlib import Path

import pytest

from flexmarl.core.durable.files import sync_folder


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
