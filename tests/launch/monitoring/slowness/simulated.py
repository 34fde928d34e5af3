"""Figures of simulated runs, in virtual time, whose causes of slowness are known."""

import tempfile
from pathlib import Path

from flexmarl.launch.config.config_reading import flattened, resolve
from flexmarl.launch.hosts import env
from flexmarl.launch.monitoring.slowness.finding import Finding
from flexmarl.launch.run_folder.run_findings import run_findings
from flexmarl.launch.simulate.simulation import simulate

RECIPES = Path(__file__).parents[2] / "recipes"


def simulated_findings(*settings: str, recipe: str = "simulated", steps: int = 8) -> list[Finding]:
    """The findings at the end of a run of the unchanged actors."""
    config = resolve(str(RECIPES / recipe), [f"training.steps={steps}", "checkpoint.every=0", *settings])
    with tempfile.TemporaryDirectory(dir=env.runtime_base()) as folder:
        simulation = simulate(config, Path(folder) / "run", seed=1, keep_log=False)
        return run_findings(simulation.directory, dict(flattened(config.model_dump(mode="json"))))
