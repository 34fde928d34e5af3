"""JSON files of a checkpoint: whole, or refused by name."""

from pathlib import Path

import pytest

from flexmarl.actors.errors import CheckpointIncomplete
from flexmarl.actors.json_files import read_json, write_json


def test_json_comes_back(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"version": 3, "names": ["a"]})
    assert read_json(tmp_path / "a.json") == {"version": 3, "names": ["a"]}


@pytest.mark.parametrize("text", ['{"version": ', "", "[1]"])
def test_torn_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(CheckpointIncomplete, match=r"a\.json"):
        read_json(tmp_path / "a.json")
