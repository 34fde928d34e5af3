"""The command ``flexmarl samples``."""

from pathlib import Path
from typing import Any

import click

from ..run_folder.samples.conditions import Condition


def _condition(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    if text is not None:
        Condition.of(text)  # raises InvalidCondition
    return text


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
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
def samples(
    run_dir: Path,
    best: int | None,
    worst: int | None,
    limit: int,
    tokens: bool,
    differences: bool,
    as_list: bool,
    as_json: bool,
    failed: bool,
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
    """
    if best and worst:
        raise click.UsageError("--best and --worst exclude each other")
    if failed and (best or worst):
        raise click.UsageError("a trajectory that failed has no reward: --failed takes no --best or --worst")
    if as_list and (best or worst or tokens or differences):
        raise click.UsageError(
            "--list shows turns in their order, without texts: no --best, --worst, --tokens or --differences"
        )
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
