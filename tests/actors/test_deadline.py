"""A trajectory's deadline: it runs while its process runs."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import closing

import pytest

from flexmarl.actors.deadline import Deadline


class StoppableLoop:
    """Timers of a loop whose process may be stopped: they are called late then."""

    def __init__(self, real: asyncio.AbstractEventLoop) -> None:
        self.now = 0.0
        self.timer: StoppableLoop.Timer | None = None
        self._real = real

    class Timer:
        def __init__(self, due: float, call: object) -> None:
            self.due, self.call, self.cancelled = due, call, False

        def when(self) -> float:
            return self.due

        def cancel(self) -> None:
            self.cancelled = True

    def time(self) -> float:
        return self.now

    def create_future(self) -> "asyncio.Future[None]":
        return asyncio.Future(loop=self._real)

    def call_later(self, delay_s: float, call: object) -> Timer:
        self.timer = self.Timer(self.now + delay_s, call)
        return self.timer

    def run(self, until: float, stopped_s: float = 0.0) -> None:
        """Runs to that time. ``stopped_s``: the process is stopped at once, for so long."""
        self.now += stopped_s
        while self.timer is not None and not self.timer.cancelled and self.timer.due <= max(until, self.now):
            timer, self.timer = self.timer, None
            self.now = max(self.now, timer.due)
            assert callable(timer.call)
            timer.call()
        self.now = max(self.now, until)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoppableLoop]:
    with closing(asyncio.new_event_loop()) as real:
        loop = StoppableLoop(real)
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
        yield loop


@pytest.mark.parametrize("limit_s", [0.5, 5.0, 12.0, 1800.0])
def test_it_overruns_at_its_time(loop: StoppableLoop, limit_s: float) -> None:
    deadline = Deadline(limit_s)
    loop.run(math.nextafter(limit_s, 0.0))
    assert not deadline.overran.done()
    loop.run(limit_s + 1e-6)
    assert deadline.overran.done()


def test_the_time_in_which_the_process_is_stopped_does_not_count(loop: StoppableLoop) -> None:
    deadline = Deadline(60.0)
    loop.run(30.0)
    loop.run(3601.0, stopped_s=3570.0)
    assert not deadline.overran.done()
    loop.run(3654.0)
    assert deadline.overran.done(), "one part of at most 5 s is counted for the stop"


def test_a_pause_within_a_part_keeps_what_has_passed(loop: StoppableLoop) -> None:
    deadline = Deadline(12.0)
    loop.run(7.0)
    with deadline.paused():
        loop.now = 100.0
    loop.run(104.9)
    assert not deadline.overran.done()
    loop.run(105.1)
    assert deadline.overran.done()
