"""The command ``flexmarl credit``: each agent's share of what a run has learned."""

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import LostActor
from ..monitoring.console.echo import echo, echo_json
from ..monitoring.console.output import Output
from ..monitoring.console.terminal import Terminal
from .exit_status import EXIT_FAILED, EXIT_STOPPED
from .options import FilePath, as_json_option, runs_option
from .run_and_report import RunOptions, run_prepared

if TYPE_CHECKING:
    from ..credit.credit_run import CreditRun
    from ..credit.shapley import Coalition, Worth


@click.command()
@click.argument("run_dir", type=FilePath(), metavar="RUN")
@click.argument("settings", nargs=-1, metavar="[KEY.KEY=VALUE]...")
@click.option(
    "--without",
    type=FilePath(),
    metavar="SOURCE",
    help="Weights of agents that are taken out: RUN/STEP, a run, or the folder of a model. Default: RUN/0, the "
    "checkpoint before training.",
)
@click.option(
    "--metric",
    default="reward",
    show_default=True,
    help="The worth of a team: a metric of the workflow, reward/AGENT, or the mean of all rewards.",
)
@click.option("--repeats", type=click.IntRange(1), metavar="K", help="Trajectories of each query.")
@click.option(
    "--orders", type=click.IntRange(2), default=20, show_default=True,
    help="Orders that are drawn if there are more than 6 agents.",
)  # fmt: skip
@click.option(
    "--name", help="Name of the folder of the evaluations, to continue one. Default: RUN's with -credit."
)
@runs_option
@as_json_option
def credit(
    run_dir: Path,
    settings: tuple[str, ...],
    without: Path | None,
    metric: str,
    repeats: int | None,
    orders: int,
    name: str | None,
    runs: Path,
    as_json: bool,
) -> int:
    """Measure each agent's share of what a run has learned: its Shapley value over the evaluation's queries.

    Each team of trained agents is evaluated, with the other agents as they were before training: 2^n evaluations for n
    agents, up to 6. An agent's value is what it adds to a team, on average over all orders in which the agents can
    join. The values add up to the difference between all agents and none. The same command again continues: complete
    evaluations are left as they are.

    \b
    Examples:
      flexmarl credit runs/first
      flexmarl credit runs/first --metric accuracy data.eval_problems=200
      flexmarl credit runs/first --without runs/first/20 --repeats 4 evaluation.temperature=0.7
      flexmarl credit runs/first --without models/small --json
    """
    from ..credit.credit_run import CreditRun
    from ..credit.shapley import orders_of, shapley_values
    from ..credit.worths import worths_of

    credit_run = CreditRun(run_dir, without, settings, repeats)
    chosen = orders_of(credit_run.agents, orders)
    folder = runs / (name or f"{run_dir.resolve().name}-credit")
    folders: dict[Coalition, Path] = {}
    coalitions = credit_run.prepare(chosen, folder)
    for number, coalition in enumerate(coalitions, 1):
        echo(f"evaluation {number} of {len(coalitions)}: {credit_run.name_of(coalition)}", err=True)
        status = _evaluate(credit_run, coalition, folder)
        if status:
            state = "was stopped: the same command continues" if status == EXIT_STOPPED else "has failed"
            echo(f"the evaluation {state} after {number - 1} complete ones, in {folder}", err=True)
            return status
        folders[coalition] = folder / credit_run.name_of(coalition)
    worth, left_out = worths_of(folders, metric)
    values = shapley_values(chosen, worth)
    if as_json:
        echo_json(_record(metric, worth, values, left_out))
    else:
        _print(metric, worth, values, left_out)
    return 0


def _evaluate(credit_run: "CreditRun", coalition: "Coalition", folder: Path) -> int:
    """The exit status. The output of the evaluation is shown if it does not end well."""
    output = io.StringIO()
    options = RunOptions(Output("quiet", output))
    try:
        with credit_run.evaluation(coalition, folder) as prepared:
            status = run_prepared(prepared, options) if prepared is not None else 0
    except LostActor:  # it is in the output
        status = EXIT_FAILED
    if status:
        echo(output.getvalue().rstrip(), err=True)
    return status


def _record(
    metric: str, worth: "Mapping[Coalition, Worth]", values: "Mapping[str, Worth]", left_out: int
) -> dict[str, Any]:
    return {
        "metric": metric,
        "values": {
            agent: {"value": float(of.mean()), "error": None if math.isnan(_error(of)) else _error(of)}
            for agent, of in values.items()
        },
        "worth": [{"agents": sorted(team), "worth": float(of.mean())} for team, of in worth.items()],
        "queries": len(next(iter(values.values()))),
        "left_out": left_out,
    }


def _print(
    metric: str, worth: "Mapping[Coalition, Worth]", values: "Mapping[str, Worth]", left_out: int
) -> None:
    from rich.table import Table

    teams = sorted(worth, key=len)
    worth_without, worth_with = float(worth[teams[0]].mean()), float(worth[teams[-1]].mean())
    table = Table("agent", "value", "error", "share", "alone", "last")
    for agent, of in sorted(values.items(), key=lambda item: -item[1].mean()):
        gain = worth_with - worth_without
        alone = (
            float(worth[frozenset([agent])].mean()) - worth_without
            if frozenset([agent]) in worth
            else math.nan
        )
        rest = teams[-1] - {agent}
        last = worth_with - float(worth[rest].mean()) if rest in worth else math.nan
        share = f"{of.mean() / gain:.0%}" if abs(gain) > _error(of) else "-"
        table.add_row(agent, f"{of.mean():+.3f}", f"{_error(of):.3f}", share, *map(_text, (alone, last)))
    Terminal().print(table)
    queries = len(next(iter(values.values())))
    gained = f"{worth_without:.3f} before training, {worth_with:.3f} with all trained agents"
    words = f"{metric}: {gained}, over {queries} queries"
    echo(
        words + (f"; {left_out} without a result in one of the evaluations are left out" if left_out else "")
    )


def _error(values: "Worth") -> float:
    """The standard error of the mean over queries."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def _text(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.3f}"
