"""The warnings of a trial that is not played to its end."""

from typing import Final

SWITCH: Final = "checks.trajectory=false starts without this try"
EMPTY_FOLDER: Final = "the try runs in an empty temporary folder"


def overrun_warning(limit_s: float, place: str | None) -> str:
    """``place``: the line at which the trial stood."""
    stood = f"; it stood at {place}" if place else ""
    return (
        "the trajectory that is played before the start was not done within checks.trajectory_timeout_s="
        f"{limit_s:g}{stood}; {SWITCH}"
    )


def broken_trial_warning(problem: str) -> str:
    """``problem``: the reason for which no trajectory was played."""
    return f"no trajectory was played before the start: {problem}; {SWITCH}"
