"""The command ``flexmarl plan``."""

from functools import partial
from pathlib import Path

import click

from ...actors.errors import ConfigError
from ..hosts.placement.plan import DoesNotFit
from ..monitoring.console.echo import echo
from ..run_folder.run_directory import RunDirectory
from ..simulate.planning.budget import cluster_settings
from ..simulate.planning.plan_result import plan_json, plan_text
from ..simulate.planning.planned_settings import scenario_yaml, settings_of
from ..simulate.planning.planned_space import planned_space
from ..simulate.planning.planner import ScenarioFile, search_plan
from ..simulate.recorded_workload import recorded_workload
from ..simulate.scenario import scenario_file
from .exit_status import EXIT_STOPPED
from .options import FilePath, as_json_option, workload_option


@click.command()
@click.argument("scenario")
@click.argument("settings", nargs=-1, metavar="[KEY.KEY=VALUE]...")
@click.option(
    "--budget", metavar="DEVICES", help='Devices in all, as "64 devices". Default: those of the cluster.'
)
@click.option(
    "--simulations",
    type=click.IntRange(1),
    default=24,
    show_default=True,
    help="Most candidates that are simulated, the most promising first.",
)
@workload_option
@click.option(
    "--write",
    "target",
    type=FilePath(dir_okay=False),
    metavar="FILE",
    help="The file for the fastest scenario. Default: SCENARIO-planned.yaml, here.",
)
@as_json_option
def plan(
    scenario: str,
    settings: tuple[str, ...],
    budget: str | None,
    simulations: int,
    recorded: Path | None,
    target: Path | None,
    as_json: bool,
) -> int:
    """Search the fastest division of a number of devices over rollouts and training, in virtual time.

    SCENARIO is that of `flexmarl simulate`. Instances of each policy, their devices, slots, ranks, the micro-batch and
    the balancing are chosen; all else stays as it is. A bound of each candidate is computed first, and the most
    promising are simulated. Numbers that do not fit the memory are left out, with what they need.

    \b
    Examples:
      flexmarl plan scenario.yaml
      flexmarl plan merchant-assistant --budget "256 devices" --simulations 12
      flexmarl plan scenario.yaml cluster.device=H200 --budget "16 devices" --json
      flexmarl plan scenario.yaml --from runs/first --write best.yaml

    Ctrl-C ends the search; the fastest so far is printed and written.
    """
    file = scenario_file(scenario)
    target = Path(f"{file.stem}-planned.yaml") if target is None else target
    _refuse_unwritable(target)
    measured = None if recorded is None else recorded_workload(RunDirectory.recorded(recorded))
    described = ScenarioFile(file, settings, measured)
    if budget is not None:
        of_cluster = cluster_settings(budget, described.read().cluster)
        described = ScenarioFile(file, (*settings, *of_cluster), measured)
    first = described.read()
    outcome = search_plan(described, planned_space(first), simulations, partial(echo, err=True))
    best = outcome.search.fastest
    if best is None and not outcome.stopped:
        raise DoesNotFit(outcome.refusals)
    if best is None:
        echo("flexmarl: stopped before the first candidate was simulated", err=True)
        return EXIT_STOPPED
    text = plan_text(outcome)
    changes = (*described.settings, *settings_of(best, first))
    target.write_text(scenario_yaml(file, changes, measured, text.split("\n\n")[0].splitlines()))
    echo(plan_json(outcome, str(target)) if as_json else f"{text}\n\n  scenario  {target}")
    return EXIT_STOPPED if outcome.stopped else 0


def _refuse_unwritable(target: Path) -> None:
    """Raises ConfigError for a file that exists, or can't be made: the search comes before it is written."""
    try:
        with target.open("x"):  # not by the folder's mode, which says nothing of /proc or to root
            pass
        target.unlink()
    except FileExistsError:
        raise ConfigError(f"{target} exists already: write another name with --write, or remove it") from None
    except OSError as error:
        raise ConfigError(
            f"{target} can't be written: {error.strerror}; --write names another file, in a folder in which you may "
            "write"
        ) from None
