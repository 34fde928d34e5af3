"""The run of a scenario in virtual time, from the scenario to its figures."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from ..config.run_config import RunConfig
from ..hosts.placement.nearest_plan import with_nearest
from ..hosts.placement.plan import DoesNotFit
from ..monitoring.console.display import Display
from .scenario import Scenario, SimulatedJob, model_shapes, simulated_job
from .simulation import Simulation, simulate
from .summary import Summary, summary_of

_LIMIT_S: Final = 365 * 86400.0


def run_scenario(
    scenario: Scenario, folder: Path, *, records_spans: bool = True, display: Display | None = None
) -> Summary:
    """Trains until the last step. ``folder``: of the run, a new one; with spans, in virtual time, if it
    ``records_spans``. ``display``: shows the run. Raises the errors of ``simulated_job`` and ``simulate``; DoesNotFit
    with the nearest settings."""
    try:
        job = simulated_job(scenario)
    except DoesNotFit as refusal:
        hosts, shapes = scenario.cluster.descriptions(scenario.twin_hosts), model_shapes(scenario.config)
        raise with_nearest(refusal, scenario.config, hosts, shapes) from None
    simulation = _play(job, scenario.hosts, folder, records_spans, display)
    return replace(summary_of(simulation, job.config), slot_states=job.slot_states)


def play_scenario(
    scenario: Scenario, folder: Path, *, records_spans: bool = True, display: Display | None = None
) -> tuple[Simulation, RunConfig]:
    """As ``run_scenario``; the run itself, and its config."""
    job = simulated_job(scenario)
    return _play(job, scenario.hosts, folder, records_spans, display), job.config


def _play(
    job: SimulatedJob, hosts: int, folder: Path, records_spans: bool, display: Display | None
) -> Simulation:
    return simulate(
        job.config, folder, job.config.seed,
        hosts=hosts, links=job.links, keep_log=False, reads_statistics=True, records_spans=records_spans,
        display=display, limit_s=_LIMIT_S,
    )  # fmt: skip
