"""The watch over a workflow that blocks its event loop."""

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.recipe.recipe_lines import line_within
from flexmarl.actors.rollout import block_watch
from flexmarl.actors.rollout.block_watch import (
    MOST_BLOCKED_LIVES,
    Blocked,
    BlockWatch,
    read_report,
    report_file,
)

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
    found: list[Blocked] = []
    deadline = time.monotonic() + PATIENCE_S

    def until() -> bool:
        if not watches:  # from now on every look finds the loop in the workflow
            watches.append(BlockWatch(recipe, report, limit_s=0.05))
        if not found and (blocked := read_report(report)) is not None:
            found.append(blocked)
        return bool(found) or time.monotonic() > deadline

    async def blocked() -> None:
        workflow(until)
        watches[0].stop()

    asyncio.run(blocked())
    (blocked_line,) = found
    assert blocked_line.lasts and not blocked_line.lost_lives
    assert blocked_line.line in (
        "workflow.py:3, in workflow: while not until():",
        "workflow.py:4, in workflow: time.sleep(0.005)",
    )


def ended_life(report: Path, **values: object) -> None:
    report.write_text(
        json.dumps({"line": "workflow.py:4, in workflow: time.sleep(9)", "lasts": True, **values})
    )


@pytest.mark.parametrize(
    "text", ["", "workflow.py:3, in workflow: ...", "[1]", '{"line": "x"}', '{"no": 1}', "\xff"]
)
def test_a_report_that_no_worker_has_written_is_none(tmp_path: Path, text: str) -> None:
    report = report_file(tmp_path, "rollout-0")
    assert read_report(report) is None
    report.write_bytes(text.encode("latin-1"))
    assert read_report(report) is None


async def next_life(recipe: Path, report: Path) -> int:
    """The lost lives that the next life knows of; its report is gone."""
    watch = BlockWatch(recipe, report)
    watch.stop()
    assert not report.exists(), "that of the earlier life"
    return watch._lost_lives


async def test_lives_that_end_while_their_loop_is_blocked_are_counted(recipe: Path, tmp_path: Path) -> None:
    report = tmp_path / "line"
    assert await next_life(recipe, report) == 0
    ended_life(report, lost_lives=0)
    assert await next_life(recipe, report) == 1
    ended_life(report, lost_lives=1)
    assert await next_life(recipe, report) == 2


async def test_a_recipe_that_blocks_every_life_is_not_started_again(recipe: Path, tmp_path: Path) -> None:
    report = tmp_path / "line"
    ended_life(report, lost_lives=MOST_BLOCKED_LIVES - 1)
    with pytest.raises(
        RecipeError, match=r"3 times one after the other; the last time in workflow.py:4, in workflow"
    ):
        BlockWatch(recipe, report)


async def test_a_life_that_ends_otherwise_ends_the_count(recipe: Path, tmp_path: Path) -> None:
    """Its loop was blocked, and was free again before it ended; or it has no report at all."""
    report = tmp_path / "line"
    ended_life(report, lost_lives=2, lasts=False)
    assert await next_life(recipe, report) == 0
    assert await next_life(recipe, report) == 0, "it left no report"


def test_a_loop_that_is_free_again_is_reported_as_such(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A life that had been blocked, and lost lives before it, works: the count begins again."""
    report = tmp_path / "line"
    ended_life(report, lost_lives=1)
    monkeypatch.setattr(block_watch, "line_within", lambda *_: "workflow.py:4, in workflow: busy()")
    deadline = time.monotonic() + PATIENCE_S

    async def blocked() -> None:
        watch = BlockWatch(recipe, report, limit_s=0.05)
        while not report.exists() and time.monotonic() < deadline:
            time.sleep(0.005)  # noqa: ASYNC251  # the loop is blocked
        assert read_report(report) == Blocked("workflow.py:4, in workflow: busy()", lasts=True, lost_lives=2)
        async with asyncio.timeout(PATIENCE_S):
            while (report_now := read_report(report)) is None or report_now.lasts:
                await asyncio.sleep(0.005)
        watch.stop()
        assert report_now == Blocked("workflow.py:4, in workflow: busy()", lasts=False)

    asyncio.run(blocked())


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
        assert looked.wait(PATIENCE_S), "it looks at a loop that this test blocks"
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
