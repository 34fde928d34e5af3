"""The run of a scenario in virtual time, from the scenario to its figures."""

from pathlib import Path
from typing import Final

from .scenario import Scenario, simulated_config
from .simulation import simulate
from .summary import Summary, summary_of

_LIMIT_S: Final = 365 * 86400.0


def run_scenario(scenario: Scenario, folder: Path, *, records_spans: bool = True) -> Summary:
    """Trains until the last step. ``folder``: of the run, a new one; with spans, in virtual time, if it
    ``records_spans``. Raises the errors of ``simulated_config`` and ``simulate``."""
    config = simulated_config(scenario)
    simulation = simulate(
        config, folder, config.seed,
        hosts=scenario.hosts, keep_log=False, reads_statistics=True, records_spans=records_spans, limit_s=_LIMIT_S,
    )  # fmt: skip
    return summary_of(simulation, config)
