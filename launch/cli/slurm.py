"""The command ``flexmarl slurm``: submits a run as a job."""

import shutil
import subprocess
import sys
from pathlib import Path

import click

from ...actors.errors import ConfigError
from ..config.run_config import RunConfig
from ..errors import JobRefused
from ..hosts.local_address import AUTO
from ..hosts.placement.actor_needs import needs_of
from ..hosts.placement.auto_ranks import with_least_ranks
from ..hosts.slurm.batch_script import Job, script
from ..monitoring.console.echo import echo, echo_file
from ..run.prepared_run import DEFAULT_RECIPE, begun_run, default_name, recipe_and_settings, resolve_given
from .options import FilePath

_SUBMIT_S = 60.0


@click.command()
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY.KEY=VALUE]...")
@click.option("--nodes", type=click.IntRange(1), required=True, metavar="N", help="Hosts of the job.")
@click.option("--gpus-per-node", type=click.IntRange(1), metavar="N", help="GPUs of each host.")
@click.option(
    "--cpus-per-node", type=click.IntRange(1), metavar="N", help="Cores of each host. Default: whole hosts."
)
@click.option("--time", metavar="TIME", help="The time limit, as for sbatch: 90 (minutes), 04:00:00, 2-00.")
@click.option("--partition", metavar="NAME", help="The partition of the hosts.")
@click.option(
    "--sbatch",
    "more",
    multiple=True,
    metavar="OPTION",
    help="Another option of sbatch, as --sbatch=--account=lab. May be repeated.",
)
@click.option(
    "--apptainer",
    "image",
    type=FilePath(),
    metavar="IMAGE",
    help="An image with flexmarl, on a disk that all hosts share: head and nodes run in it.",
)
@click.option(
    "--warn-s",
    type=click.IntRange(1, 65535),
    default=120,
    show_default=True,
    metavar="S",
    help="The seconds ahead of the time limit at which the run stops with a checkpoint, and the job is put into the "
    "queue again. Steps under way are finished first.",
)
@click.option("--name", help="The run's name. Default: recipe and time.")
@click.option(
    "--runs",
    type=FilePath(),
    default=Path("runs"),
    show_default=True,
    help="The folder of all runs, on a disk that all hosts share.",
)
@click.option("--dry-run", is_flag=True, help="Print the batch script, and stop.")
def slurm(
    words: tuple[str, ...],
    nodes: int,
    gpus_per_node: int | None,
    cpus_per_node: int | None,
    time: str | None,
    partition: str | None,
    more: tuple[str, ...],
    image: Path | None,
    warn_s: int,
    name: str | None,
    runs: Path,
    dry_run: bool,
) -> int:
    """Train a recipe as a job of Slurm.

    Writes runs/NAME.sbatch and submits it; its output goes to runs/NAME.out. The job continues the run NAME if it is
    there already.

    \b
    Examples:
      flexmarl slurm path/to/recipe --nodes 4 --gpus-per-node 8 --time 04:00:00
      flexmarl slurm path/to/recipe --nodes 2 --name first training.steps=50 --dry-run
      flexmarl slurm path/to/recipe --nodes 4 --gpus-per-node 8 --sbatch=--account=lab
      flexmarl slurm path/to/recipe --nodes 4 --gpus-per-node 8 --apptainer /shared/flexmarl.sif
    """
    recipe_argument, overrides = recipe_and_settings(words)
    recipe = recipe_argument or DEFAULT_RECIPE
    config, _ = resolve_given(recipe, overrides)
    _check_gpus(config, gpus_per_node, more)
    name = name or default_name(config)
    begun_run(runs, name, recipe)
    if nodes > 1 and config.network.listen is None:
        overrides.append(f"network.listen={AUTO}")
    job = Job(
        run=(runs / name).absolute(),
        words=(config.recipe, *overrides),
        command=_command(image, has_gpus=_has_gpus(gpus_per_node, more)),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_node=cpus_per_node,
        time=time,
        partition=partition,
        warn_s=warn_s,
        more=more,
    )
    if dry_run:
        echo_file(script(job))
        return 0
    number = _submit(job)
    echo(f"job {number}: {job.run}\n  script  {job.file}\n  output  {job.output}\n  cancel  scancel {number}")
    return 0


def _command(image: Path | None, *, has_gpus: bool) -> tuple[str, ...]:
    """The words that start flexmarl on a host of the job: with this Python, or in ``image``."""
    if image is None:
        return (sys.executable, "-P", "-m", "flexmarl.launch.cli.main")
    return ("apptainer", "exec", *(["--nv"] if has_gpus else []), str(image.absolute()), "flexmarl")


def _check_gpus(config: RunConfig, gpus_per_node: int | None, more: tuple[str, ...]) -> None:
    """Raises ConfigError if the job would have no GPUs, and the config wants some."""
    if _has_gpus(gpus_per_node, more):
        return
    for need in needs_of(with_least_ranks(config)):
        if need.gpus or need.named:
            raise ConfigError(
                f"--gpus-per-node is missing: {need.actor} needs a GPU ({need.key}), and Slurm would give the job none"
            )


def _has_gpus(gpus_per_node: int | None, more: tuple[str, ...]) -> bool:
    return gpus_per_node is not None or any("gpu" in option for option in more)


def _submit(job: Job) -> str:
    """The number of the job. Raises JobRefused."""
    if shutil.which("sbatch") is None:
        raise JobRefused(
            "there is no sbatch here: run it on a login node of the cluster; --dry-run prints the batch script"
        )
    job.run.parent.mkdir(parents=True, exist_ok=True)
    job.file.write_text(script(job))
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(job.file)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_SUBMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise JobRefused(f"sbatch does not answer within {_SUBMIT_S:g} s: is slurmctld running?") from None
    if done.returncode:
        raise JobRefused(f"sbatch refuses {job.file}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
