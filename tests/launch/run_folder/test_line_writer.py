"""Lines on a disk that is full for a while: each is in the file, whole and once, or is named."""

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from flexmarl.launch.run_folder.line_writer import LineWriter, words_of_steps

from ...full_disk import room_for

SEEDS = range(20)


def record(step: int, size_bytes: int = 10_000) -> dict[str, Any]:
    return {"step": step, "note": "x" * size_bytes}


def steps_in(path: Path) -> list[int]:
    content = path.read_text()
    assert content == "" or content.endswith("\n")
    return [json.loads(line)["step"] for line in content.splitlines()]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_disk_that_is_full_for_a_while_costs_no_line(tmp_path: Path, seed: int) -> None:
    """Full at any byte of any line; the part of the line that found room is cut off again."""
    chance = random.Random(seed)
    path, said = tmp_path / "metrics.jsonl", list[str]()
    lines = LineWriter(path, said.append)
    room = chance.randrange(60_000)
    for step in range(1, 8):
        with room_for(room):
            lines.write(record(step, chance.randrange(8_000, 20_000)))
        whole = steps_in(path)
        assert whole == list(range(1, len(whole) + 1))
    assert len(said) == 1 and f"{path} can't be written (File too large)" in said[0]
    lines.retry()
    assert steps_in(path) == list(range(1, 8))
    assert said[1:] == [
        f"{path} can be written again: it has {words_of_steps(range(len(whole) + 1, 8))}, which waited"
    ]
    lines.write(record(8))
    lines.close()
    assert steps_in(path) == list(range(1, 9)) and len(said) == 2


def test_the_steps_that_never_find_room_are_named_at_the_end(tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", list[str]()
    lines = LineWriter(path, said.append)
    with room_for(25_000):
        for step in (1, 2, 3, 4, 6):
            lines.write(record(step))
        lines.close()
    assert steps_in(path) == [1, 2]
    assert said[1:] == [f"{path} lacks steps 3-4 and 6: File too large"]


def test_memory_for_waiting_lines_is_bounded(tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", list[str]()
    lines = LineWriter(path, said.append, waiting_bytes=35_000)
    with room_for(5_000):
        for step in range(1, 8):
            lines.write(record(step))
    lines.close()
    assert steps_in(path) == [5, 6, 7]
    assert said[-1] == f"{path} lacks steps 1-4: they did not fit into memory"


def test_a_part_that_can_not_be_cut_off_at_once_is_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = tmp_path / "metrics.jsonl", list[str]()
    lines = LineWriter(path, said.append)
    truncate = os.ftruncate

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with room_for(5_000):
        monkeypatch.setattr(os, "ftruncate", failing)
        lines.write(record(1))
        assert path.stat().st_size == 5_000
    lines.write(record(2))
    assert path.stat().st_size == 5_000
    monkeypatch.setattr(os, "ftruncate", truncate)
    lines.write(record(3))
    lines.close()
    assert steps_in(path) == [1, 2, 3] and len(said) == 2


def test_a_folder_that_is_missing_for_a_while_costs_no_line(tmp_path: Path) -> None:
    path, said = tmp_path / "away" / "events.jsonl", list[str]()
    lines = LineWriter(path, said.append)
    lines.write({"event": "run_started", "step": 1})
    path.parent.mkdir()
    lines.write({"event": "run_ended", "step": 2})
    lines.close()
    assert steps_in(path) == [1, 2]
    assert "has 2 events: run_started, run_ended, which waited" in said[1]


@pytest.mark.parametrize(
    ("steps", "words"),
    [([3], "step 3"), ([4, 3], "steps 3-4"), ([1, 3, 9, 8], "steps 1, 3 and 8-9"), ([2, 5], "steps 2 and 5")],
)
def test_steps_in_words(steps: list[int], words: str) -> None:
    assert words_of_steps(steps) == words
