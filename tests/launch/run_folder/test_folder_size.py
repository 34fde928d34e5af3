"""The size of a folder, also of one that another process changes."""

import os
import shutil
from pathlib import Path

import pytest

from flexmarl.launch.run_folder.folder_size import folder_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    for name in ("first", "second", "inner/third", "inner/deeper/fourth"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(100))
    return folder


def test_all_files_count_and_no_links(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "first")
    (folder / "inner" / "above").symlink_to(folder)
    assert folder_bytes(folder) == 400
    assert folder_bytes(folder / "missing") == 0


def test_what_goes_between_its_listing_and_its_opening_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lstat = os.lstat

    def lstat_late(path: Path) -> os.stat_result:
        monkeypatch.undo()
        (folder / ("second" if path.name == "first" else "first")).unlink()
        shutil.rmtree(folder / "inner")
        return lstat(path)

    monkeypatch.setattr(os, "lstat", lstat_late)
    assert folder_bytes(folder) == 100
