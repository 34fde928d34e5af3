"""Sinks that raise, hang or are slow: the run neither stops nor waits for them."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexmarl.actors.run_events import RunEvent, SinkClosed, SinkFailed, SinkOpened
from flexmarl.launch.monitoring.sinks import run_sinks, sink_thread
from flexmarl.launch.monitoring.sinks.run_sinks import RunSinks
from flexmarl.launch.monitoring.sinks.sink import Figures, SinkRun
from flexmarl.launch.monitoring.sinks.sink_thread import SinkThread

from ....patience import PATIENCE_S


class Recorded:
    """A sink that keeps the steps, and does ``first`` before that."""

    appends_only = False

    def __init__(
        self, first: Callable[[int], object] = lambda step: None, opening: Iterator[object] | None = None
    ) -> None:
        self.steps: list[int] = []
        self.closed: list[bool] = []
        self._first, self._opening = first, opening or iter(())

    def open(self, run: SinkRun, series: str) -> tuple[str, str]:
        next(self._opening, None)
        return "", "here"

    def write(self, figures: Figures) -> None:
        self._first(figures.step)
        self.steps.append(figures.step)

    def close(self, failed: bool) -> None:
        self.closed.append(failed)


def of_step(step: int) -> Callable[[], Figures]:
    return lambda: Figures("step", step, 0.0, {"loss/a": 1.0})


async def fed(sink: Recorded, folder: Path, steps: int = 4) -> list[RunEvent]:
    said: list[RunEvent] = []
    thread = SinkThread("one", sink, SinkRun(folder, folder), said.append)
    for step in range(1, steps + 1):
        thread.put(of_step(step))
    await thread.close(PATIENCE_S, failed=False)
    return said


def exits(step: int) -> None:
    if step == 2:
        sys.exit(3)
    if step == 3:
        raise ValueError("three")


async def test_an_error_loses_its_step_is_reported_once_and_counted(tmp_path: Path) -> None:
    sink = Recorded(exits)
    said = await fed(sink, tmp_path)
    assert sink.steps == [1, 4] and sink.closed == [False]
    assert said == [SinkOpened("one", "here"), SinkFailed("one", "SystemExit: 3"), SinkClosed("one", 2, 2, 2)]


async def test_one_that_can_not_be_opened_is_tried_again_at_the_next_step(tmp_path: Path) -> None:
    def opening() -> Iterator[None]:
        for problem in ("down", "still down"):
            problems.append(problem)
            yield None

    class Down(Recorded):
        def open(self, run: SinkRun, series: str) -> tuple[str, str]:
            if next(self._opening, "up") is None:
                raise ConnectionError(problems[-1])
            return "", "here"

    problems: list[str] = []
    sink = Down(opening=opening())
    said = await fed(sink, tmp_path)
    assert sink.steps == [2, 3, 4]
    assert said == [
        SinkFailed("one", "ConnectionError: down"),
        SinkOpened("one", "here"),
        SinkClosed("one", 3, 1, 2),
    ]


async def test_one_that_hangs_takes_no_time_of_the_run_and_is_left_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_thread, "QUEUED", 10)
    monkeypatch.setattr(run_sinks, "_CLOSE_S", 0.05)
    began, released = threading.Event(), threading.Event()

    def hang(step: int) -> None:
        began.set()
        assert released.wait(PATIENCE_S)

    said: list[RunEvent] = []
    hanging, other = Recorded(hang), Recorded()
    async with RunSinks(
        [("hangs", hanging), ("works", other)], SinkRun(tmp_path, tmp_path), said.append
    ) as sinks:
        first, second = sinks._threads
        first.put(of_step(1))
        assert await asyncio.to_thread(began.wait, PATIENCE_S)
        for step in range(2, 100):  # no await: the loop is never left
            first.put(of_step(step))
        for step in range(1, 8):
            second.put(of_step(step))
        async with asyncio.timeout(PATIENCE_S):
            while len(other.steps) < 7:
                await asyncio.sleep(0.005)
    assert other.steps == list(range(1, 8)) and hanging.steps == []
    assert SinkFailed("hangs", "TimeoutError: not closed within 0.05 s") in said
    [closed] = [event for event in said if isinstance(event, SinkClosed) and event.sink == "hangs"]
    assert (closed.written, closed.lost) == (0, 99)
    count = len(said)
    released.set()
    await asyncio.to_thread(first._thread.join, PATIENCE_S)
    await asyncio.sleep(0)
    assert len(said) == count, "it is not heard any more"


async def test_a_sink_is_closed_as_failed_if_the_run_fails(tmp_path: Path) -> None:
    sink = Recorded()
    with pytest.raises(ValueError, match="of the run"):
        async with RunSinks([("one", sink)], SinkRun(tmp_path, tmp_path), lambda event: None):
            raise ValueError("of the run")
    assert sink.closed == [True]


async def test_a_damaged_series_is_an_error_of_the_sink_alone(tmp_path: Path) -> None:
    (tmp_path / "sinks").mkdir()
    (tmp_path / "sinks" / "one.json").write_text("{")
    said = await fed(Recorded(), tmp_path)
    assert isinstance(said[0], SinkFailed) and said[-1] == SinkClosed("one", 0, 4, 5)
