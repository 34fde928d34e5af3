"""Runs side by side."""

from pathlib import Path
from typing import Any

from flexmarl.launch.run_folder.compare import MISSING, PRESENT, compare
from flexmarl.launch.run_folder.stored_run import StoredRun


def run_with(config: dict[str, Any]) -> StoredRun:
    return StoredRun(
        path=Path("run"), recipe="cup", state="done", error=None, step=1, steps=1, evaluated_step=None, evaluation={},
        rewards={}, wall_s=1.0, age_s=1.0, size_bytes=1, checkpoints=(), config=config,
    )  # fmt: skip


def test_a_key_that_one_run_lacks_differs() -> None:
    compared = compare([run_with({"seed": 0, "mode": "strict"}), run_with({"mode": "strict"})])
    assert compared.config == {"seed": (0, MISSING)}


def test_a_policy_that_one_run_lacks_is_one_key() -> None:
    of_two = {"policies.a.lr": 1, "policies.b.lr": 1, "policies.b.clip": 2, "agents.x.policy": "b"}
    of_one = {"policies.a.lr": 3, "agents.x.policy": "a"}
    assert compare([run_with(of_two), run_with(of_one)]).config == {
        "policies.a.lr": (1, 3),
        "policies.b": (PRESENT, MISSING),
        "agents.x.policy": ("b", "a"),
    }
