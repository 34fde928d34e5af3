"""The command ``flexmarl store``."""

import dataclasses
from pathlib import Path

import click

from ..monitoring import store_view
from ..monitoring.console.echo import echo_json
from .options import FilePath


@click.command()
@click.argument("run_dir", type=FilePath())
@click.argument("where", default="")
@click.option(
    "--trajectory",
    metavar="ID",
    help="Show all turns of a trajectory, in order, and its conversation if that is recorded: its name, or the id of "
    "one of its samples.",
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Rows to show.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def store(run_dir: Path, where: str, trajectory: str | None, limit: int, as_json: bool) -> int:
    """Show samples in the experience store of a run, by an SQL expression over their columns.

    RUN_DIR is the folder of a run, or an address file of it. A run that has ended is read from its store's journal.

    Columns: agent, sample_id, step, group, query, turn, trajectory, query_position, policy_version, version_changes,
    status, optimizer_step, reward, advantage, group_size, temperature, truncation, and the float, int, bool and str
    columns that the config declares. Trained samples are kept for 16 steps; the oldest are shown first.

    \b
    Examples:
      flexmarl store runs/first-try
      flexmarl store runs/first-try "reward > 0.5 and agent = 'checker'"
      flexmarl store runs/first-try "advantage > 2"
      flexmarl store runs/first-try "status = 'ready'" --limit 5 --json
      flexmarl store runs/first-try --trajectory 12:q7_0_3
    """
    if trajectory is not None and where:
        raise click.UsageError("--trajectory takes no expression: it shows all turns of one trajectory")
    if trajectory is None:
        selection = store_view.select(run_dir, where, limit)
    else:
        selection = store_view.trajectory(run_dir, trajectory)
    if as_json:
        echo_json(dataclasses.asdict(selection))
    else:
        store_view.show(selection)
        if trajectory is not None:
            store_view.show_conversation(run_dir, selection)
    return 0
