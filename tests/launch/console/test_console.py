"""What the console writes down and says aloud."""

import errno
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as Terminal

from flexmarl.core.system import ActorSystem
from flexmarl.launch.console.console import Console
from flexmarl.launch.console.progress import Progress
from flexmarl.launch.run_directory import RunDirectory


class Watched:
    """A console whose screen is a string."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory.create(folder / "run", "seed: 0\n")
        self.screen = StringIO()
        progress = Progress(
            Terminal(file=self.screen), run_name="run", mode="strict", total_steps=9, agents=["a"]
        )
        self.progress = progress.__enter__()
        self.console = Console(self.run, self.progress)

    def text(self) -> str:
        self.progress.__exit__(None, None, None)
        return " ".join(self.screen.getvalue().split())

    def lines(self, path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
async def watched(system: ActorSystem, tmp_path: Path) -> Watched:
    watched = Watched(tmp_path)
    await system.add(watched.console, "console")
    return watched


async def test_a_step_that_generates_nothing_is_said_once(watched: Watched) -> None:
    for step in (1, 2, 3):
        await watched.console.step({"step": step, "tokens": 0})
    assert watched.text().count("no agent generated anything") == 1
    assert [line["step"] for line in watched.lines(watched.run.metrics)] == [1, 2, 3]


async def test_the_evaluation_before_training_shows_its_metrics(watched: Watched) -> None:
    await watched.console.event("evaluated", {"step": 0, "eval_s": 3.0, "accuracy": 0.25})
    assert "before training: accuracy 0.250" in watched.text()
    (event,) = watched.lines(watched.run.events)
    assert (event["event"], event["step"], event["accuracy"]) == ("evaluated", 0, 0.25)


async def test_both_files_are_closed_though_one_can_not_be_written(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "seed: 0\n")
    run.metrics.symlink_to("/dev/full")
    progress = Progress(Terminal(file=StringIO()), run_name="run", mode="strict", total_steps=9, agents=["a"])
    console = Console(run, progress)
    with pytest.raises(OSError, match="No space left"):
        await console.step({"step": 1})
    with pytest.raises(OSError, match="No space left"):
        await console.on_stop()
    assert console.ended_with.cancelled()
    with pytest.raises(ValueError, match="closed file"):
        await console.event("too_late", {})


@pytest.mark.parametrize(("actor", "hint"), [("rollout", True), ("trainer", False)])
async def test_a_silent_actor_is_named(watched: Watched, actor: str, hint: bool) -> None:
    await watched.console.event("actor_silent", {"actor": actor, "seconds": 12.0})
    text = watched.text()
    assert f"{actor} has not answered for 12 s" in text
    assert ("does the workflow block its event loop?" in text) == hint


async def test_what_training_waits_for_is_told(watched: Watched) -> None:
    await watched.console.event("columns_awaited", {"agent": "solver", "samples": 3, "columns": "judged"})
    assert "3 samples of solver wait for judged, which somebody outside of the run writes" in watched.text()


async def test_a_full_disk_is_told_on_the_screen_though_not_in_the_file(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(watched.console._events, "event", no_room)
    with pytest.raises(OSError, match="No space"):
        await watched.console.event("store_full", {"problem": "no room for 9 bytes"})
    assert "the store waits for room: no room for 9 bytes" in watched.text()
