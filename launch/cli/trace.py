"""The command ``flexmarl trace``."""

from pathlib import Path

import click

from ..monitoring.console.echo import echo
from ..run_folder.run_directory import RunDirectory
from .options import FilePath


@click.command()
@click.argument("run_dir", type=FilePath(file_okay=False))
@click.option(
    "-o",
    "--output",
    type=FilePath(dir_okay=False),
    help="The file; compressed if its name ends with .gz. Default: RUN_DIR's name with .trace.json.gz, here.",
)
@click.option("--from-step", type=click.IntRange(1), help="The first step. Default: from the run's begin.")
@click.option("--to-step", type=click.IntRange(1), help="The last step. Default: to the run's end.")
def trace(run_dir: Path, output: Path | None, from_step: int | None, to_step: int | None) -> int:
    """Write the timeline of a run for https://ui.perfetto.dev or chrome://tracing. The run may be running.

    Each instance, training slot and rollout worker is a thread, and arrows lead from a query's trajectory over its
    turns, samples, micro-batches and the optimizer step to the instances that install the new weights.

    \b
    Examples:
      flexmarl trace runs/first
      flexmarl trace runs/first -o first.json --from-step 10 --to-step 12
    """
    from ..monitoring.timeline.chrome_trace import write_trace

    if from_step and to_step and from_step > to_step:
        raise click.UsageError(f"--from-step {from_step} is behind --to-step {to_step}")
    directory = RunDirectory.recorded(run_dir)
    file = output or Path(f"{directory.path.resolve().name}.trace.json.gz")
    spans = write_trace(directory, file, (from_step, to_step))
    echo(f"{file} has {spans} spans: open it at https://ui.perfetto.dev")
    return 0
