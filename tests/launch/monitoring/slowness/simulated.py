"""Figures of simulated runs, in virtual time, whose causes of slowness are known."""

import tempfile
from dataclasses import replace
from pathlib import Path

from flexmarl.launch.config.config_reading import flattened, resolve
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.hosts import env
from flexmarl.launch.hosts.placement.plan import Plan
from flexmarl.launch.monitoring.slowness.finding import Finding
from flexmarl.launch.run_folder.run_findings import run_findings
from flexmarl.launch.simulate.cluster_config import ClusterConfig
from flexmarl.launch.simulate.cluster_links import ClusterLinks, StateSizes
from flexmarl.launch.simulate.simulation import place_simulated, simulate

RECIPES = Path(__file__).parents[2] / "recipes"


def simulated_findings(
    *settings: str, recipe: str = "simulated", steps: int = 8, state_s: float | None = None
) -> list[Finding]:
    """The findings at the end of a run of the unchanged actors. ``state_s``: seconds in which a state moves to a slot
    or from it; None: it takes no time."""
    config = resolve(str(RECIPES / recipe), [f"training.steps={steps}", "checkpoint.every=0", *settings])
    with tempfile.TemporaryDirectory(dir=env.runtime_base()) as folder:
        simulation = simulate(
            config, Path(folder) / "run", seed=1, keep_log=False, links=_links(config, state_s)
        )
        return run_findings(simulation.directory, dict(flattened(config.model_dump(mode="json"))))


def _links(config: RunConfig, state_s: float | None) -> ClusterLinks | None:
    """One host whose slots have a device each, with links of a byte a second."""
    if state_s is None:
        return None
    device = {
        "tflops": 1,
        "memory_gib": 1,
        "memory_gb_s": 1,
        "link_gb_s": 1,
        "host_gb_s": 1e-9,
        "link_share": 1,
    }
    cluster = ClusterConfig.model_validate({"hosts": 1, "devices": 8, "device": device})
    plan = Plan(
        {
            name: replace(placed, gpus=(int(name.removeprefix("slot-")),) if name.startswith("slot-") else ())
            for name, placed in place_simulated(config, ["host-0"]).actors.items()
        }
    )
    return ClusterLinks(cluster, 1, plan, dict.fromkeys(config.policies, StateSizes(0.0, state_s, state_s)))
