"""The comparisons of T10: folders of runs that are equal, and that differ in one figure or weight."""

import json
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from scripts.gpu import end_to_end
from scripts.gpu.checks import Card
from scripts.gpu.end_to_end import POLICIES, Sizes, check_paths, compare, train_all
from scripts.gpu.trained import TrainRun


class Folder(TrainRun):
    """A run that has ended: its folder alone."""

    def __init__(self, folder: Path, loss: float = 0.5, weight: float = 1.0, path: str = "shm") -> None:
        self.name, self.folder = folder.name, folder
        for policy in POLICIES:
            checkpoint = folder / "checkpoints" / "step_000002" / policy
            checkpoint.mkdir(parents=True)
            save_file({"layer": torch.tensor([weight, 2.0])}, checkpoint / "model.safetensors")
        lines = [{"step": step} | {f"loss/{policy}": loss * step for policy in POLICIES} for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        choice = {"event": "weights_path_chosen", "path": path, "refused": {"cuda_ipc": "no card"}}
        (folder / "events.jsonl").write_text(f"{json.dumps(choice)}\n")


def verdicts(run: TrainRun, like: TrainRun) -> list[bool]:
    return [cast(bool, check.passed) for check in compare(run, like)]


def test_figures_and_weights_are_compared_bit_for_bit(tmp_path: Path) -> None:
    like = Folder(tmp_path / "like")
    assert verdicts(Folder(tmp_path / "same"), like) == [True, True]
    assert verdicts(Folder(tmp_path / "loss", loss=0.5 + 1e-16 * 2), like) == [False, True]
    assert verdicts(Folder(tmp_path / "weight", weight=1 + 2**-20), like) == [True, False]
    (first, _) = compare(Folder(tmp_path / "other", loss=0.25), like)
    assert first.value == "4 others, the first: loss/sorter of step 1: 0.25, not 0.5"


def test_a_run_that_stops_early_is_not_equal(tmp_path: Path) -> None:
    like, short = Folder(tmp_path / "like"), Folder(tmp_path / "short")
    (short.folder / "metrics.jsonl").write_text(json.dumps(short.metrics[0]) + "\n")
    with pytest.raises(ValueError, match="longer than argument 1"):
        list(compare(short, like))


def test_the_path_of_weights_is_shown_with_what_was_refused(tmp_path: Path) -> None:
    check = check_paths(Folder(tmp_path / "run"), "cuda_ipc")
    assert not check.passed and check.value == "shm, {'cuda_ipc': 'no card'}"


class Slow(TrainRun):
    """A run that does not end."""

    def __init__(self, card: Card, name: str, *_words: Any) -> None:
        self.name, self.folder = name, card.folder / name
        self.output, self.runtime = card.folder / f"{name}.out", card.folder / f"{name}-runtime"
        self.output.write_text(f"step 3 of {name}\n")
        self.process = subprocess.Popen(["sleep", "1000"])


def test_runs_that_are_late_are_named(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_to_end, "TrainRun", Slow)
    checks = {check.name: check for check in train_all(card, Sizes(limit_s=0.0))}
    for name in ("static", "bfloat16", "adapters", "exact", "shared"):
        late = f"Late: {name} has not ended; its last line: step 3 of {name}"
        assert checks[f"{name}: ended"].value == late and checks[f"{name}: ended"].passed is False
    assert "kills, not in time" in str(checks["kills: ended"].value)
    assert checks["end: processes left"].criterion
