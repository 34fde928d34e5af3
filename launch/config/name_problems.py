"""Checks of names, which are also names of metrics, actors and files. Rows of the table in ``problems.py``."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .run_config import RunConfig

NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
_RESERVED: Final = ("rewards", "rollout", "slot")
"""``rewards-0``, ``rollout-0`` and ``slot-0`` are the names of other actors than instances."""


def name_problem(config: "RunConfig") -> str | None:
    """Refuses names of agents, policies and recipes that can't be names of metrics, actors or files."""
    for kind, names in (("agent", config.agents), ("policy", config.policies)):
        for name in names:
            if not NAME.fullmatch(name):
                return f"{kind} name {name!r}: lower-case letters, digits and _, at most 32, a letter first"
    if not Path(config.recipe).name.isprintable():
        return f"recipe folder {Path(config.recipe).name!r} has characters that can't be printed: rename it"
    if "metrics" in config.agents:
        return "agent name 'metrics' is taken: Rewards(metrics=...) means something else"
    if reserved := [name for name in config.policies if name in _RESERVED]:
        return (
            f"policy name {reserved[0]!r} is taken: its instances would have the names of rollout workers, reward "
            "services or slots; choose another"
        )
    return None
