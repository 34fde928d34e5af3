"""The lengths of answers of a recorded run, as a workload has them."""

import math
from collections.abc import Mapping
from statistics import NormalDist, fmean
from typing import Any, Final

from ...actors.errors import ConfigError
from ..run_folder.json_lines import read_lines
from ..run_folder.run_directory import RunDirectory

_PERCENTILE: Final = "turn_tokens_p"
_TENTHS: Final = 2 * NormalDist().inv_cdf(0.9)
"""Standard deviations between the tenth and the ninetieth percentile."""


def recorded_lengths(run: RunDirectory) -> dict[str, dict[str, float]]:
    """The section ``answer`` of each agent: the lognormal distribution with the run's percentiles, the means over its
    steps. Raises ConfigError for a run that has none."""
    rows, _ = read_lines(run.metrics) if run.metrics.exists() else ([], 0)
    key = f"{_PERCENTILE}50/"
    agents = dict.fromkeys(name.removeprefix(key) for row in rows for name in row if name.startswith(key))
    if not agents:
        raise ConfigError(f"{run.path} has no lengths of answers: no step of it is complete")
    return {agent: _answer([row for row in rows if f"{key}{agent}" in row], agent) for agent in agents}


def _answer(rows: list[Mapping[str, Any]], agent: str) -> dict[str, float]:
    p10, p50, p90 = (
        fmean(math.log(max(1.0, row[f"{_PERCENTILE}{percent}/{agent}"])) for row in rows)
        for percent in (10, 50, 90)
    )
    return {"median": math.exp(p50), "sigma": (p90 - p10) / _TENTHS}


def set_lengths(workload: Any, recorded: Mapping[str, Mapping[str, float]], source: str) -> None:
    """Puts recorded lengths in place of those that the section has. Raises ConfigError for an agent that the run does
    not have."""
    agents = workload.get("agents") if isinstance(workload, dict) else None
    for name, section in agents.items() if isinstance(agents, dict) else ():
        if name not in recorded:
            raise ConfigError(
                f"--from {source}: that run has no agent {name!r}; it has: {', '.join(recorded)}"
            )
        if isinstance(section, dict):
            section["answer"] = dict(recorded[name])
