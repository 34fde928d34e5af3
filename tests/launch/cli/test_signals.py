"""Signals to a run's process."""

import asyncio
import os
import signal
from typing import Any, cast

import pytest

from flexmarl.launch.cli import signals
from flexmarl.launch.cli.signals import StopSignals
from flexmarl.launch.monitoring.console.no_display import NoDisplay

from ...patience import PATIENCE_S


class Stops:
    """A run that takes requests to stop. ``asked``: signal, and whether at once."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []

    def request_stop(self, by: str, *, now: bool = False) -> bool:
        self.asked.append((by, now))
        return not now


async def test_two_sigterms_at_once_are_one_request_and_ctrl_c_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signals, "SAME_REQUEST_S", PATIENCE_S)  # of a busy machine: at once
    run = Stops()
    with StopSignals(cast(Any, run), NoDisplay()):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            before = len(run.asked)
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05 if len(run.asked) == before else 0)
    assert run.asked == [("SIGTERM", False), ("SIGINT", True)]
