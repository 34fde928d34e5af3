"""The commands ``flexmarl status``, ``stop`` and ``logs``, for a run on this host."""

import asyncio
import dataclasses
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import click

from ..core.errors import ActorDead, CallTimeout
from ..core.system import ActorSystem
from .errors import RunDirectoryError
from .formatting import duration
from .run_address import RunAddress
from .run_control import NAME, RunControl, RunStatus
from .run_directory import RunDirectory
from .stored_runs import stored_run

Answer = TypeVar("Answer")

_TIMEOUT_S = 30.0
_FOLDER = click.Path(path_type=Path, file_okay=False)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command()
@click.argument("run_dir", type=_FOLDER)
@_as_json
def status(run_dir: Path, as_json: bool) -> int:
    """Show step, phase and processes of a running run; of another one, its state and last step.

    \b
    Example:
      flexmarl status runs/first
    """
    directory = RunDirectory.existing(run_dir)
    if not stored_run.is_alive(directory):
        run = stored_run.read_run(run_dir)
        found: dict[str, object] = {
            "state": run.state,
            "error": run.error,
            "step": run.step,
            "steps": run.steps,
        }
        words = f"{run_dir}: {run.state}, step {run.step}/{run.steps}" + (
            f"\n{run.error}" if run.error else ""
        )
    else:
        answer = _ask(directory, lambda control: control.status())
        found = {"state": "running", **dataclasses.asdict(answer)}
        words = _words(run_dir, answer)
    click.echo(json.dumps(found) if as_json else words)
    return 0


@click.command()
@click.argument("run_dir", type=_FOLDER)
@click.option("--now", is_flag=True, help="At once, without a checkpoint.")
@_as_json
def stop(run_dir: Path, now: bool, as_json: bool) -> int:
    """Stop a running run as ctrl-C does: after the steps under way, with a checkpoint. It does not wait for the end.

    \b
    Examples:
      flexmarl stop runs/first
      flexmarl stop runs/first --now
    """
    directory = RunDirectory.existing(run_dir)
    graceful = _ask(directory, lambda control: control.stop("flexmarl stop", now))
    how = "after the steps under way, with a checkpoint" if graceful else "at once"
    click.echo(json.dumps({"checkpoint": graceful}) if as_json else f"{run_dir} stops {how}")
    return 0


@click.command()
@click.argument("run_dir", type=_FOLDER)
@click.argument("actor", default="launcher")
def logs(run_dir: Path, actor: str) -> int:
    """Print the log of an actor of a run, by default the launcher's.

    \b
    Example:
      flexmarl logs runs/first trainer
    """
    directory = RunDirectory.existing(run_dir)
    known = {path.stem: path for path in sorted(directory.logs.glob("*.log"))}
    if actor not in known:
        raise RunDirectoryError(f"{run_dir} has no log of {actor!r}; there are: {', '.join(known) or 'none'}")
    click.echo(known[actor].read_text(errors="replace"), nl=False)
    return 0


def _words(run_dir: Path, found: RunStatus) -> str:
    instances = ", ".join(f"{name} x{count}" for name, count in found.instances.items())
    lines = [
        f"{run_dir}: running for {duration(found.since_s)}, step {found.step}/{found.steps}",
        f"phase      {found.phase}",
        f"policies   {instances}",
        *(f"{name:<12} pid {one.pid:<8} {one.rss_mib:>9.1f} MiB" for name, one in found.processes.items()),
    ]
    return "\n".join(lines)


def _ask(directory: RunDirectory, question: Callable[[RunControl], Awaitable[Answer]]) -> Answer:
    """Raises RunDirectoryError if no process works on the run, or another user's does."""
    if not stored_run.is_alive(directory):
        raise RunDirectoryError(f"{directory.path} is not running")
    try:
        address = RunAddress.load(directory.control_address)
    except FileNotFoundError:
        raise RunDirectoryError(
            f"{directory.path} starts or ends: it can't be asked yet, or any more"
        ) from None
    except PermissionError:
        owner = directory.control_address.stat().st_uid
        raise RunDirectoryError(f"{directory.path} is a run of user {owner}, not {os.geteuid()}") from None
    try:
        return asyncio.run(_answer(address, question))
    except (ActorDead, CallTimeout) as error:
        raise RunDirectoryError(f"{directory.path} does not answer: has it ended? {error}") from None


async def _answer(run: RunAddress, question: Callable[[RunControl], Awaitable[Answer]]) -> Answer:
    async with ActorSystem(f"look-{os.getpid()}", keys=run.keys) as system:
        return await question(system.ref(NAME, run.address, RunControl).within(_TIMEOUT_S))
