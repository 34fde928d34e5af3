"""A limit of time that pauses."""

import asyncio
from typing import Final

_PART_S: Final = 5.0
_ROUNDING_S: Final = 1e-6


class Deadline:
    """``limit_s`` seconds from now, without the time while it is paused or this process is stopped. ``overran`` is done
    when they have passed.

    The time is counted in parts of at most ``_PART_S``: one during which the process was stopped (SIGSTOP, a frozen
    container) is longer, and counts as one of that length.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._left_s = limit_s
        self._pauses = 0
        self._timer: asyncio.TimerHandle | None = None
        self._counted_until = 0.0
        self._paused = _Paused(self)
        self.overran: asyncio.Future[None] = self._loop.create_future()
        self._run()

    def paused(self) -> "_Paused":
        """A context without its time; may be entered several times at once."""
        return self._paused

    def pause(self) -> None:
        """Stops the time until ``resume`` was called as often as this. Keeps the timer running."""
        # The timer stays: there is a pause in every turn, most are short, and setting a timer costs more than one that
        # fires in vain. If it fires in a pause, ``_pass`` sets no other; ``resume`` does.
        self._pauses += 1
        if self._pauses == 1:
            self._count()

    def resume(self) -> None:
        """Lets the time continue, at the last of as many calls as ``pause`` had."""
        self._pauses -= 1
        if not self._pauses:
            self._counted_until = self._loop.time()
            # A timer that is still set was meant for an earlier time, as if there had been no pause: it fires too
            # early, and ``_pass`` sets the next one.
            if self._timer is None:
                self._run()

    def stop(self) -> None:
        """Cancels ``overran``."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.overran.cancel()

    def _run(self) -> None:
        if not self.overran.done():
            self._counted_until = self._loop.time()
            self._timer = self._loop.call_later(min(max(0.0, self._left_s), _PART_S), self._pass)

    def _count(self) -> None:
        self._left_s -= min(self._loop.time() - self._counted_until, _PART_S)

    def _pass(self) -> None:
        self._timer = None
        if self._pauses:  # there is nothing to count until ``resume``
            return
        self._count()
        if self._left_s > _ROUNDING_S:
            self._run()
        elif not self.overran.done():
            self.overran.set_result(None)


class _Paused:
    """Pauses a deadline while it is entered."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def __enter__(self) -> None:
        self._deadline.pause()

    def __exit__(self, *_: object) -> None:
        self._deadline.resume()
