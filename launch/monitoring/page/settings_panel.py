"""The panel *Settings*: the run's config by dotted key, its machine, and the changes of resumes."""

from typing import Any

from ....actors.run_events import RunResumed, RunStarted
from .curves import Query
from .recorded_run import RecordedRun


def view(run: RecordedRun, query: Query) -> dict[str, Any]:
    """Values are texts, as the config file has them. ``query`` has no parameters."""
    lives = [logged for logged in run.lives if isinstance(logged.event, RunStarted | RunResumed)]
    return {
        "path": str(run.path),
        "config": {key: _text(value) for key, value in run.config.items()},
        "lives": [
            {
                "time": logged.time,
                "step": logged.line.get("step"),
                "machine": f"Python {logged.line.get('python')}, {logged.line.get('platform')}, "
                f"{logged.line.get('cpus')} CPUs",
                "changes": logged.event.changes if isinstance(logged.event, RunResumed) else {},
            }
            for logged in lives
        ],
    }


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
