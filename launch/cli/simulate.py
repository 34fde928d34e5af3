"""The command ``flexmarl simulate``."""

import time
from pathlib import Path

import click

from ...actors.errors import ConfigError
from ..monitoring.console.echo import echo
from ..monitoring.console.no_display import NoDisplay
from ..monitoring.console.terminal import Terminal
from ..run.prepared_run import checked_name
from ..run_folder.run_directory import RunDirectory
from ..simulate.baselines import BASELINES, in_mode
from ..simulate.recorded_workload import recorded_workload
from ..simulate.scenario import read_scenario, scenario_file
from ..simulate.scenario_run import run_scenario
from ..simulate.simulated_progress import SimulationProgress
from .chaos import replay, search
from .options import as_json_option, runs_option, workload_option


@click.command()
@click.argument("scenario", required=False)
@click.argument("settings", nargs=-1, metavar="[KEY.KEY=VALUE]...")
@click.option(
    "--seed",
    type=click.IntRange(0),
    help="Seed of lengths, times and the order of messages. Default: the scenario's.",
)
@click.option(
    "--mode",
    metavar="MODE",
    help=f"Train in the way of another system, or without a part: {', '.join(BASELINES)}.",
)
@workload_option
@click.option(
    "--chaos",
    type=click.IntRange(1),
    metavar="N",
    help="Instead of a scenario: N random small runs under random faults, each checked. --seed: the first one.",
)
@click.option(
    "--chaos-seed",
    type=click.IntRange(0),
    metavar="SEED",
    help="Play one of these again, and keep its files.",
)
@click.option("--faults", metavar="N,N", help="With --chaos-seed: of its faults only these; none for none.")
@click.option("--name", help="The run's name. Default: scenario and time.")
@runs_option
@as_json_option
def simulate(
    scenario: str | None,
    settings: tuple[str, ...],
    seed: int | None,
    mode: str | None,
    recorded: Path | None,
    chaos: int | None,
    chaos_seed: int | None,
    faults: str | None,
    name: str | None,
    runs: Path,
    as_json: bool,
) -> int:
    """Play a run on a described cluster, in virtual time, and print how long its steps take.

    SCENARIO is a YAML file with train's keys and the sections cluster and workload, or the name of a built-in one:
    merchant-assistant, category-assistant, fleet-5x32b, fleet-3x32b-7x14b, fleet-15x14b. The run's own actors run in
    this process; engines and trainers take the times that rooflines of the devices say. The run's files are in
    runs/NAME/, as those of any other run. Its step is shown on standard error while it plays; not with --json.

    \b
    Examples:
      flexmarl simulate merchant-assistant
      flexmarl simulate merchant-assistant --mode marti --seed 7
      flexmarl simulate scenario.yaml cluster.device=H200 cluster.hosts=8 --json
      flexmarl simulate scenario.yaml --from runs/first
      flexmarl simulate --chaos 100
    """
    if (scenario is None) == (chaos is None and chaos_seed is None):
        raise click.UsageError("give a SCENARIO, or --chaos N, or --chaos-seed SEED")
    if chaos is not None and (chaos_seed is not None or name is not None):
        raise click.UsageError(
            "--chaos keeps no files and plays many seeds: leave out --chaos-seed and --name"
        )
    if faults is not None and chaos_seed is None:
        raise click.UsageError("--faults are those of --chaos-seed SEED")
    if scenario is None and (recorded is not None or mode is not None):
        raise click.UsageError("--from and --mode are for a SCENARIO")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    if chaos is not None:
        return search(chaos, seed or 0, as_json=as_json)
    if chaos_seed is not None:
        folder = runs / (f"chaos-{chaos_seed}-{stamp}" if name is None else checked_name(name))
        return replay(chaos_seed, faults, folder, as_json=as_json)
    assert scenario is not None, "refused above"
    file = scenario_file(scenario)
    seeded = settings if seed is None else (*settings, f"seed={seed}")
    measured = None if recorded is None else recorded_workload(RunDirectory.recorded(recorded))
    described = read_scenario(file, seeded, measured)
    if mode is not None:
        described = in_mode(described, mode)
    folder = runs / (f"{file.stem}-{stamp}" if name is None else checked_name(name))
    if folder.exists():  # its own refusal offers to continue a run: a simulation has no such option
        raise ConfigError(f"{folder} exists already: choose another --name")
    progress = SimulationProgress(Terminal(stderr=True, soft_wrap=True), described.config.training.steps)
    with NoDisplay() if as_json else progress as display:
        summary = run_scenario(described, folder, display=display)
    echo(summary.as_json() if as_json else f"{summary.text()}\n  run  {folder}")
    return 0
