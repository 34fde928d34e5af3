"""The command ``flexmarl samples``."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..monitoring.console.echo import echo
from ..run_folder.samples.conditions import Condition, FigureCondition
from .options import FilePath

_TYPED = ParameterSource.COMMANDLINE
_OF_DEMONSTRATIONS = frozenset(
    {"run_dir", "as_demonstrations", "success", "step", "query", "answer", "evaluation"}
)
"""Options that choose demonstrations; the others say how trajectories are shown."""


def _condition(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    if text is not None:
        Condition.of(text)  # raises InvalidCondition
    return text


def _success(context: click.Context, option: click.Parameter, text: str) -> FigureCondition:
    return FigureCondition.of(text)  # raises InvalidCondition


@click.command()
@click.argument("run_dir", type=FilePath())
@click.option(
    "--step", callback=_condition, help="12, 10-20 or '>100': of training, or before the evaluation."
)
@click.option("--agent", help="Only trajectories with turns of this agent; its reward counts.")
@click.option("--reward", callback=_condition, help="A turn's reward: '<0.2', '>=0.5', 1 or 0.2-0.8.")
@click.option("--query", help="The id of a query, or a part of its text.")
@click.option("--answer", help="A part of an answer; with --agent, of one of that agent.")
@click.option(
    "--evaluation/--training", default=None, help="Only evaluations, or only training. Default: both."
)
@click.option("--failed", is_flag=True, help="Only trajectories that failed.")
@click.option("--best", type=click.IntRange(1), metavar="N", help="The N with the highest rewards.")
@click.option("--worst", type=click.IntRange(1), metavar="N", help="The N with the lowest rewards.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Trajectories to show, the newest; lines of --list.",
)
@click.option("--tokens", is_flag=True, help="Show each token, the redder the less probable it was.")
@click.option(
    "--differences", is_flag=True, help="Show each token, the redder the more trainer and engine differ."
)
@click.option("--list", "as_list", is_flag=True, help="Show one line for each turn, without texts.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object for each trajectory, or turn with --list."
)
@click.option(
    "--as-demonstrations",
    metavar="FILE",
    type=FilePath(dir_okay=False),
    help="Show none: write the best success of each query to this new file, for rollout.demonstrations.",
)
@click.option(
    "--success",
    default="reward>=1",
    show_default=True,
    callback=_success,
    help="A success, for --as-demonstrations: by the mean reward of its agents, or a metric: 'accuracy=1'.",
)
@click.pass_context
def samples(
    context: click.Context,
    /,
    run_dir: Path,
    best: int | None,
    worst: int | None,
    limit: int,
    tokens: bool,
    differences: bool,
    as_list: bool,
    as_json: bool,
    failed: bool,
    as_demonstrations: Path | None,
    success: FigureCondition,
    **filters: Any,
) -> int:
    """Show the trajectories of a run as conversations: prompts, answers, rewards, advantages. The run may be running.

    Recorded are the last steps (samples.steps in the config, 50 by default) and all evaluations.

    \b
    Examples:
      flexmarl samples runs/first
      flexmarl samples runs/first --evaluation --worst 3
      flexmarl samples runs/first --agent checker --reward '<0.2' --step '>100'
      flexmarl samples runs/first --query q000017 --tokens
      flexmarl samples runs/first --agent checker --differences
      flexmarl samples runs/first --failed --list
      flexmarl samples runs/first --best 100 --json | jq -r '.turns[-1].text'
      flexmarl samples runs/first --as-demonstrations walks.jsonl --success 'accuracy=1'
    """
    _refuse_mixtures(context)
    if as_demonstrations is not None:
        return _write(run_dir, as_demonstrations, success, filters)
    from ..run_folder.samples.reader import Order, Samples
    from ..run_folder.samples.showing import show_list, show_trajectories

    if failed or best or worst:
        filters["failed"] = failed
    with Samples(run_dir) as reader:
        if as_list:
            show_list(reader, filters, limit, as_json=as_json)
            return 0
        order: Order = "best" if best else "worst" if worst else "newest"
        show_trajectories(
            reader,
            run_dir,
            order,
            best or worst or limit,
            filters,
            tokens=tokens or differences,
            as_json=as_json,
            shade="difference" if differences else "probability",
        )
    return 0


def _refuse_mixtures(context: click.Context) -> None:
    """Raises UsageError for options that have no meaning beside the surplus."""
    options = {name for name in context.params if context.get_parameter_source(name) is _TYPED}
    if "as_demonstrations" in options and (surplus := sorted(options - _OF_DEMONSTRATIONS)):
        raise click.UsageError(
            f"--as-demonstrations shows no trajectories, and has no use for --{surplus[0].removeprefix('as_')}: "
            "choose by --success, --step, --query, --answer and --training"
        )
    if "success" in options and "as_demonstrations" not in options:
        raise click.UsageError("--success chooses demonstrations: give --as-demonstrations FILE too")
    if {"best", "worst"} <= options:
        raise click.UsageError("--best and --worst exclude each other")
    if "failed" in options and options & {"best", "worst"}:
        raise click.UsageError("a trajectory that failed has no reward: --failed takes no --best or --worst")
    if "as_list" in options and options & {"best", "worst", "tokens", "differences"}:
        raise click.UsageError(
            "--list shows turns in their order, without texts: no --best, --worst, --tokens or --differences"
        )


def _write(run_dir: Path, file: Path, success: FigureCondition, filters: dict[str, Any]) -> int:
    from ..run_folder.samples.demonstrations import left_out_note, write_demonstrations
    from ..run_folder.samples.reader import Samples

    if file.exists():  # an expert's walks are hard to make again
        raise click.UsageError(f"{file} exists: name a new file, or remove it")
    with Samples(run_dir) as reader:
        written = write_demonstrations(reader, file, success, **filters)
    echo(
        f"{file} has demonstrations of {written.queries} queries: the best of {written.successes} successes among "
        f"{written.trajectories} trajectories{left_out_note(written.left_out)}"
    )
    return 0
