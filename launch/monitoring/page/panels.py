"""The panels of the page: one row each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from . import (
    figures_panel,
    learning_panel,
    now_panel,
    policies_panel,
    settings_panel,
    timeline_panel,
    trajectories_panel,
)
from .curves import Query
from .recorded_run import RecordedRun

View = Callable[[RecordedRun, Query], Any]


@dataclass(frozen=True, slots=True)
class Panel:
    """``name``: in addresses; ``web/panels/NAME.js`` draws it. ``view``: JSON-able values of a run, for a request's
    parameters; its texts are made harmless afterwards."""

    name: str
    title: str
    view: View
    reads_samples: bool = False
    """It reads trajectories alone, and may raise SamplesUnreadable."""
    has_own_lock: bool = False
    """Its first look at a long run takes seconds: it holds a lock of its own, and no other panel waits for it."""


PANELS: Final = (
    Panel("now", "Now", now_panel.view),
    Panel("learning", "Learning", learning_panel.view),
    Panel("trajectories", "Trajectories", trajectories_panel.view, reads_samples=True, has_own_lock=True),
    Panel("timeline", "Timeline", timeline_panel.view, has_own_lock=True),
    Panel("policies", "Policies and pool", policies_panel.view),
    Panel("figures", "Figures", figures_panel.view),
    Panel("settings", "Settings", settings_panel.view),
)
