"""The command ``flexmarl train``."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from ...actors.errors import ConfigError
from ...core.telemetry import LOG_LEVELS, LogLevel
from ..config.config_reading import read_yaml, to_yaml
from ..config.config_warnings import warnings_about
from ..config.run_config import RunConfig
from ..config.written_config import WrittenConfig
from ..hosts.nodes.hosts_file import read_hosts
from ..hosts.nodes.joined_cluster import WAIT_S, NodeRequest
from ..hosts.placement.nearest_plan import plan_run
from ..hosts.placement.plan_table import plan_as_comment
from ..hosts.placement.run_placement import like_this_host, made_up_hosts, place_run
from ..monitoring.console.echo import echo, echo_file
from ..monitoring.console.output import Form, Output
from ..run.prepared_run import (
    DEFAULT_RECIPE,
    begun_run,
    changed_settings,
    new_run,
    recipe_and_settings,
    resolve_given,
    validate_new_run,
)
from ..run.resuming import differences
from ..run_folder.run_directory import RunDirectory
from ..simulate.workload_config import WORKLOAD_RECIPE
from .options import FilePath, runs_option
from .run_and_report import RunOptions, run_with_restarts


@click.command()
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY.KEY=VALUE]...")
@click.option("--name", help="The run's name. Default: recipe and time.")
@runs_option
@click.option(
    "--resume",
    type=FilePath(),
    metavar="RUN_DIR",
    help="Continue a run with its configuration. Settings of the optimizer, and those that don't change what is "
    "learned (steps, checkpoint, evaluation, limits), may be changed: KEY=VALUE.",
)
@click.option(
    "--accept",
    multiple=True,
    metavar="NAME",
    help="With --resume or --continue: continue although NAME, a file of the recipe or `data`, has changed. "
    "May be repeated.",
)
@click.option(
    "--continue",
    "continues",
    is_flag=True,
    help="Continue the run --name if it is there already, else begin it: for jobs that are started again by Slurm or "
    "another scheduler.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="If an actor is lost (killed, out of memory, stopped, silent), continue from the newest checkpoint by itself, "
    "at most N times without a newer checkpoint in between. Default: 0.",
)
@click.option(
    "--nodes",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Wait for N other hosts, on which `flexmarl node` joins the run, and place actors there too. It needs "
    "network.listen=ADDRESS or network.listen=auto.",
)
@click.option(
    "--hosts",
    type=FilePath(dir_okay=False),
    metavar="FILE",
    help="Start these nodes by ssh: one host a line, NAME [USER@]ADDRESS port=PORT python=PATH; all but the name may "
    "be left out.",
)
@click.option(
    "--wait-s",
    type=click.FloatRange(0),
    default=WAIT_S,
    show_default=True,
    help="The longest wait for these hosts, in seconds.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check config, recipe, models and devices, print the config and the place of each actor, and stop.",
)
@click.option(
    "--on",
    "machine",
    metavar="HOSTSxCARDSxMEMORY",
    help="Print the plan for hosts that are not here, as 2x8x80GiB, and stop: from the config alone, without checks of "
    "the recipe, engines and devices.",
)
@click.option("-q", "--quiet", "form", flag_value="quiet", help="Print warnings and the result alone.")
@click.option(
    "-v",
    "--verbose",
    "form",
    flag_value="verbose",
    help="Print a line for every step, and tracebacks of failures.",
)
@click.option(
    "--json", "form", flag_value="json", help="Print one JSON object per event and step, and nothing else."
)
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default="info",
    show_default=True,
    help="The least level of the lines in runs/NAME/logs/.",
)
def train(
    words: tuple[str, ...],
    name: str | None,
    runs: Path,
    resume: Path | None,
    accept: tuple[str, ...],
    continues: bool,
    restarts: int,
    nodes: int,
    hosts: Path | None,
    wait_s: float,
    dry_run: bool,
    machine: str | None,
    form: Form | None,
    log_level: LogLevel,
) -> int:
    """Train the agents of a recipe together; all files of the run are in runs/NAME/.

    RECIPE is a built-in recipe (default: sort-digits) or a folder with workflow.py and config.yaml.

    \b
    Examples:
      flexmarl train
      flexmarl train sort-digits training.steps=50 seed=1
      flexmarl train path/to/recipe --name first-try
      flexmarl train agents.sorter.instances=2 --dry-run
      flexmarl train path/to/recipe --dry-run --on 2x8x80GiB
      flexmarl train --resume runs/first-try
      flexmarl train --resume runs/first-try training.steps=200
      flexmarl train path/to/recipe checkpoint.every=20 --restarts 3
      flexmarl train path/to/recipe network.listen=10.0.0.1 --nodes 2
      flexmarl train path/to/recipe --json | jq 'select(.event == "evaluated")'

    Ctrl-C stops after the running steps and saves a checkpoint; a second ctrl-C stops at once.
    """
    node_request = _node_request(nodes, hosts, wait_s)
    options = RunOptions(Output.standard(form or "normal"), log_level, restarts, node_request)
    recipe_argument, overrides = recipe_and_settings(words)
    recipe = recipe_argument or DEFAULT_RECIPE
    if resume is not None:
        if recipe_argument or name or dry_run or continues:
            raise ConfigError("--resume takes no recipe, --name, --continue or --dry-run: they are the run's")
        _refuse_plan(machine, dry_run, "--resume trains a run")
        directory = RunDirectory.existing(resume)
        _refuse_simulation(directory)
        with directory.locked():
            return run_with_restarts(None, directory, options, overrides, accept)
    if continues:
        if name is None:
            raise ConfigError("--continue needs --name, the run that is begun or continued")
        if (begun := begun_run(runs, name, recipe)) is not None:
            _refuse_plan(machine, dry_run, f"{begun.path} has begun, and --continue trains it")
            with begun.locked():
                changes = changed_settings(begun, recipe, overrides)
                return run_with_restarts(None, begun, options, changes, accept)
    elif accept:
        raise ConfigError("--accept is for --resume and --continue")
    if machine is not None:
        return _show_plan_elsewhere(*resolve_given(recipe, overrides), machine)
    if dry_run:
        return _show_plan(recipe, overrides, runs, name, node_request)
    with new_run(recipe, overrides, runs, name, options.output.note, node_request.count) as prepared:
        return run_with_restarts(prepared, prepared.directory, options)


def _node_request(nodes: int, hosts: Path | None, wait_s: float) -> NodeRequest:
    """The other hosts that the run is to have. Raises ConfigError if both options give them."""
    if hosts is not None and nodes:
        raise ConfigError("--hosts has the nodes: leave out --nodes")
    by_ssh = () if hosts is None else read_hosts(hosts)
    return NodeRequest(nodes or len(by_ssh), wait_s, by_ssh)


def _refuse_plan(machine: str | None, dry_run: bool, reason: str) -> None:
    """Raises ConfigError if an option asks for a plan alone: a run would be trained instead."""
    if machine is not None or dry_run:
        option = "--dry-run" if machine is None else f"--on {machine}"
        raise ConfigError(f"{option} is for a new run: {reason}. Leave out one of the two options")


def _refuse_simulation(directory: RunDirectory) -> None:
    """Raises ConfigError for the folder of a simulated run: it would be continued by processes that wait."""
    recipe = Path(str(read_yaml(directory.config).get("recipe")))
    if recipe.resolve() == WORKLOAD_RECIPE.resolve():
        raise ConfigError(
            f"{directory.path} is a simulation: `flexmarl simulate` plays it from its start, with another --name"
        )


def _show_plan(
    recipe: str, overrides: Sequence[str], runs: Path, name: str | None, node_request: NodeRequest
) -> int:
    """Checks a new run, and prints its config and the place of each actor."""
    # Notices of slow checks go beside the config, which a program may read.
    notify = partial(echo, err=True)
    config, _, _ = validate_new_run(recipe, overrides, runs, name, notify, node_request.count)
    plan = place_run(config, like_this_host(node_request.count), all_models=True)
    warnings = "".join(f"# warning: {text}\n" for text in warnings_about(config))
    echo_file(f"{to_yaml(config)}{plan_as_comment(plan)}{warnings}")
    echo("# checked; nothing was started or written")
    return 0


def _show_plan_elsewhere(config: RunConfig, keys: WrittenConfig, machine: str) -> int:
    """Prints the place of each actor on hosts that are not here."""
    hosts = made_up_hosts(machine)
    chosen, placement = plan_run(config, hosts, keys)
    echo_file(plan_as_comment(placement))
    if changes := differences(config, chosen):
        numbers = dict.fromkeys(keys.in_text(f"{key}={number}") for key, (_, number) in changes.items())
        echo(f"# chosen: {', '.join(numbers)}")
    for text in warnings_about(chosen):
        echo(f"# warning: {keys.in_text(text)}")
    echo("# nothing was checked, started or written")
    return 0
