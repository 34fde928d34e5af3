"""The causes of a standstill as lines for people. Pure."""

from collections.abc import Mapping
from typing import Final

from ....core.waits import ProcessWaits, Wait
from ...monitoring.formatting import duration

_MOST_LINES: Final = 8


def sentences(
    reports: Mapping[str, ProcessWaits], blocked: Mapping[str, str], silence: str
) -> tuple[str, ...]:
    """The lines of ``wait_lines``. If nothing waits, one line that says this."""
    lines = wait_lines(reports, blocked, silence)
    return lines or ("no actor names a wait; `flexmarl logs RUN` may have more",)


def wait_lines(
    reports: Mapping[str, ProcessWaits], blocked: Mapping[str, str], silence: str
) -> tuple[str, ...]:
    """A line for each cause, the most certain first: processes that do not answer, then the waits that are not the
    consequence of another actor's; without any of them, the consequences.

    ``reports``: by process. ``blocked``: by rollout worker, the line of the recipe that blocks its loop. ``silence``:
    the setting that ends a silent process.
    """
    silent = [name for name, report in reports.items() if report.waits is None]
    lines = [_of_silent(name, reports[name].label, blocked.get(name, ""), silence) for name in silent]
    waits = [
        (actor, wait)
        for report in reports.values()
        for actor, of_actor in (report.waits or {}).items()
        for wait in of_actor
    ]
    causes = [(actor, wait) for actor, wait in waits if not wait.actor]
    if not causes and not lines:
        causes = waits
    causes.sort(key=lambda cause: -cause[1].seconds)
    lines += [_of_wait(actor, wait) for actor, wait in causes]
    more = len(lines) - _MOST_LINES
    return tuple(lines if more <= 0 else [*lines[:_MOST_LINES], f"and {more} more"])


def _of_silent(name: str, label: str, line: str, limit: str) -> str:
    hint = f"; the workflow blocks its event loop: {line}" if line else ""
    return f"{name} ({label}) does not answer{hint}; {limit} ends it"


def _of_wait(actor: str, wait: Wait) -> str:
    limit = f"; {wait.limit}" if wait.limit else ""
    return f"{actor}: {wait.text}, for {duration(wait.seconds)}{limit}"
