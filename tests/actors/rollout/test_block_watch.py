"""The watch over a workflow that blocks its event loop."""

import asyncio
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from flexmarl.actors.recipe_lines import line_within
from flexmarl.actors.rollout import block_watch
from flexmarl.actors.rollout.block_watch import BlockWatch

from ...patience import PATIENCE_S

BLOCKING = """import time
def workflow(until):
    while not until():
        time.sleep(0.005)
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(block_watch, "_INTERVAL_S", 0.01)
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "workflow.py").write_text(BLOCKING)
    return folder


def test_the_line_of_the_recipe_is_reported_while_the_loop_is_blocked(recipe: Path, tmp_path: Path) -> None:
    """The loop is blocked until the report is there: no message could leave the process."""
    report = tmp_path / "line"
    names: dict[str, object] = {}
    exec(compile(BLOCKING, str(recipe / "workflow.py"), "exec"), names)  # the file of the fixture
    workflow = names["workflow"]
    assert callable(workflow)

    watches: list[BlockWatch] = []
    deadline = time.monotonic() + PATIENCE_S

    def until() -> bool:
        if not watches:  # from now on every look finds the loop in the workflow
            watches.append(BlockWatch(recipe, report, limit_s=0.05))
        return report.exists() or time.monotonic() > deadline

    async def blocked() -> None:
        workflow(until)
        watches[0].stop()

    asyncio.run(blocked())
    assert report.read_text() in (
        "workflow.py:3, in workflow: while not until():",
        "workflow.py:4, in workflow: time.sleep(0.005)",
    )


def test_a_loop_that_is_free_or_blocked_by_other_code_is_not_reported(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Event()

    def line_of(folder: Path, frame: FrameType | None) -> str | None:
        line = line_within(folder, frame)
        looked.set()
        return line

    async def blocked() -> None:
        watch = BlockWatch(recipe, tmp_path / "line", limit_s=0.05)
        await asyncio.sleep(0.05)
        assert looked.wait(30), "it looks at a loop that this test blocks"
        watch.stop()
        await asyncio.to_thread(watch._thread.join)

    monkeypatch.setattr(block_watch, "line_within", line_of)
    asyncio.run(blocked())
    assert not (tmp_path / "line").exists()


def test_the_innermost_line_of_the_folder_counts() -> None:
    def called_by_the_recipe() -> str | None:
        return line_within(Path(__file__).parent, sys._getframe())

    line = called_by_the_recipe()
    assert line is not None
    assert line.startswith("test_block_watch.py:") and line.endswith(
        "in called_by_the_recipe: return line_within(Path(__file__).parent, sys._getframe())"
    )
    assert line_within(Path("/nowhere"), sys._getframe()) is None
    assert line_within(Path("/nowhere"), None) is None
