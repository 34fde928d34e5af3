"""The command ``flexmarl train``."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click
import uvloop

from ...actors.errors import ConfigError
from ...actors.orchestrator import checkpoint
from ...core.durable.files import open_private
from ...core.errors import FlexmarlError, is_loss
from ...core.telemetry import LOG_LEVELS, LogLevel, configure_logging
from ..config.config_reading import flattened, read_yaml, to_yaml
from ..config.config_warnings import warnings_about
from ..config.run_config import RunConfig
from ..config.written_config import WrittenConfig
from ..errors import Interrupted, LostActor
from ..hosts.nodes.hosts_file import read_hosts
from ..hosts.nodes.joined_cluster import WAIT_S, NodeRequest
from ..hosts.placement.auto_ranks import with_chosen_ranks
from ..hosts.placement.plan_table import plan_as_comment
from ..hosts.placement.run_placement import like_this_host, made_up_hosts, place_run
from ..monitoring.console.echo import echo, echo_file
from ..monitoring.console.output import Form, Output
from ..monitoring.slowness.words import finding_lines
from ..run.prepared_run import (
    DEFAULT_RECIPE,
    PreparedRun,
    begun_run,
    changed_settings,
    new_run,
    recipe_and_settings,
    resolve_given,
    resume_from_newest_checkpoint,
    validate_new_run,
)
from ..run.resuming import differences
from ..run.run import Run
from ..run.run_endings import failure_text, has_lost_samples, run_summary
from ..run_folder.run_directory import RunDirectory
from ..run_folder.run_findings import run_findings
from ..simulate.workload_config import WORKLOAD_RECIPE
from .exit_status import EXIT_FAILED, EXIT_STOPPED
from .options import runs_option
from .signals import train_until_signal


@click.command()
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY.KEY=VALUE]...")
@click.option("--name", help="The run's name. Default: recipe and time.")
@runs_option
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
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
    type=click.Path(path_type=Path, dir_okay=False),
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
    if hosts is not None and nodes:
        raise ConfigError("--hosts has the nodes: leave out --nodes")
    by_ssh = () if hosts is None else read_hosts(hosts)
    node_request = NodeRequest(nodes or len(by_ssh), wait_s, by_ssh)
    options = RunOptions(Output.standard(form or "normal"), restarts, log_level, node_request)
    recipe_argument, overrides = recipe_and_settings(words)
    if resume is not None:
        if recipe_argument or name or dry_run or continues:
            raise ConfigError("--resume takes no recipe, --name, --continue or --dry-run: they are the run's")
        _refuse_plan(machine, dry_run, "--resume trains a run")
        directory = RunDirectory.existing(resume)
        _refuse_simulation(directory)
        with directory.locked():
            return _train(None, directory, options, overrides, accept)
    recipe = recipe_argument or DEFAULT_RECIPE
    if continues:
        if name is None:
            raise ConfigError("--continue needs --name, the run that is begun or continued")
        if (begun := begun_run(runs, name, recipe)) is not None:
            _refuse_plan(machine, dry_run, f"{begun.path} has begun, and --continue trains it")
            with begun.locked():
                return _train(None, begun, options, changed_settings(begun, recipe, overrides), accept)
    elif accept:
        raise ConfigError("--accept is for --resume and --continue")
    if machine is not None:
        return _show_plan_elsewhere(*resolve_given(recipe, overrides), machine)
    if dry_run:
        # Notices of slow checks go beside the config, which a program may read.
        notify = partial(echo, err=True)
        config, _, _ = validate_new_run(recipe, overrides, runs, name, notify, node_request.count)
        return _show_plan(config, node_request)
    with new_run(recipe, overrides, runs, name, options.output.note, node_request.count) as prepared:
        return _train(prepared, prepared.directory, options)


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


def _show_plan(config: RunConfig, node_request: NodeRequest) -> int:
    """Prints the config, and the place of each actor."""
    plan = place_run(config, like_this_host(node_request.count), all_models=True)
    warnings = "".join(f"# warning: {text}\n" for text in warnings_about(config))
    echo_file(f"{to_yaml(config)}{plan_as_comment(plan)}{warnings}")
    echo("# checked; nothing was started or written")
    return 0


def _show_plan_elsewhere(config: RunConfig, keys: WrittenConfig, machine: str) -> int:
    """Prints the place of each actor on hosts that are not here."""
    hosts = made_up_hosts(machine)
    chosen = with_chosen_ranks(config, lambda: hosts)
    echo_file(plan_as_comment(place_run(chosen, hosts, all_models=True)))
    if changes := differences(config, chosen):
        numbers = ", ".join(keys.in_text(f"{key}={number}") for key, (_, number) in changes.items())
        echo(f"# chosen: {numbers}")
    echo("# nothing was checked, started or written")
    return 0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of ``flexmarl train`` that are not part of the run's configuration. ``restarts``: after the loss of an
    actor, at most this many without a newer checkpoint in between. ``log_level``: of the files in ``logs/``."""

    output: Output
    restarts: int
    log_level: LogLevel
    nodes: NodeRequest


def _train(
    first: PreparedRun | None,
    directory: RunDirectory,
    options: RunOptions,
    overrides: Sequence[str] = (),
    accepted: Sequence[str] = (),
) -> int:
    """Runs until the end, and again after the loss of an actor, or of samples with a host: this one without
    ``--restarts``, as often as the run has other hosts without a newer checkpoint in between. Returns the exit status.

    ``first``: a new run; None: the run continues from its newest checkpoint, or from the beginning before the first;
    so does every restart, on the nodes that are there then, also fewer. ``overrides``, ``accepted``: see
    ``resuming.plan_resume``.
    """
    prepared = first
    restarts_left = most = Counter({False: options.restarts, True: max(1, options.nodes.count)})
    while True:
        prepared = prepared or resume_from_newest_checkpoint(
            directory, overrides, accepted, options.output.note, options.nodes.count
        )
        start = prepared.start
        if start.is_complete:
            options.output.answer(f"{directory.path} is complete: all {start.step} steps are trained")
            return 0
        if prepared is not first:
            options.output.note(
                f"continuing after {start.place}" if start.checkpoint else "no checkpoint yet: starting again"
            )
        try:
            return run_prepared(prepared, options)
        except LostActor as lost:  # already reported
            folders = checkpoint.complete(directory.checkpoints)
            if folders and (start.checkpoint is None or folders[-1] != start.checkpoint[0]):
                restarts_left = most
            if not restarts_left[lost.with_samples]:
                return EXIT_FAILED
            restarts_left, prepared = restarts_left - Counter([lost.with_samples]), None
            options = replace(options, nodes=replace(options.nodes, fewer=True))


def run_prepared(prepared: PreparedRun, options: RunOptions) -> int:
    """Runs until the end or a failure, and reports it. Raises LostActor, reported too: a restart may follow."""
    directory, config, first = prepared.directory, prepared.start.config, prepared.start.step
    display = options.output.display(config, directory.path.name, first)
    try:
        with open_private(directory.logs / "launcher.log", "a") as log:
            configure_logging("launcher", log, options.log_level)
            run = Run.from_prepared(prepared, display, options.log_level, options.nodes)
            result = uvloop.run(train_until_signal(run, display))
    except KeyboardInterrupt:  # before the run's own signal handlers are set
        return _report_failure(Interrupted("stopped by SIGINT"), directory, options.output)
    except (FlexmarlError, OSError, asyncio.CancelledError) as error:
        status = _report_failure(error, directory, options.output)
        if is_loss(error) or has_lost_samples(error):
            raise LostActor(str(error), with_samples=has_lost_samples(error)) from error
        return status
    words = run_summary(
        result,
        first=first,
        folder=directory.path,
        report=directory.report,
        wall_s=round(display.wall_s, 3),
        held_out=config.evaluation.held_out,
    )
    keys = dict(flattened(config.model_dump(mode="json")))
    # Those that a setting would change: the longest part alone is in the status and on the page.
    causes = [finding for finding in run_findings(directory, keys) if finding.key]
    options.output.result("\n".join([words, *finding_lines(causes)]))
    return EXIT_STOPPED if result.stopped else 0


def _report_failure(error: BaseException, directory: RunDirectory, output: Output) -> int:
    newest = None
    with contextlib.suppress(OSError):
        newest = next(reversed(checkpoint.complete(directory.checkpoints)), None)
    output.result(failure_text(error, directory.path, newest))
    return EXIT_STOPPED if isinstance(error, Interrupted) else EXIT_FAILED
