"""The commands ``flexmarl status``, ``stop``, ``logs`` and ``admit``.

RUN is the folder of a run, or an address file of it: ``runs/NAME/address``, or one that ``flexmarl admit`` has written.
With such a file they work from every host that reaches the run.
"""

import dataclasses
from pathlib import Path

import click

from .connected_run import query_run
from .console.echo import echo, echo_file, echo_json
from .formatting import duration
from .run_control import CALLS, Right, RunStatus
from .run_directory import RunDirectory
from .stored_runs import stored_run

_RUN = click.Path(path_type=Path)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command()
@click.argument("run", type=_RUN)
@_as_json
def status(run: Path, as_json: bool) -> int:
    """Show step, phase and processes of a running run; of another one, its state and last step.

    \b
    Examples:
      flexmarl status runs/first
      flexmarl status first.address
    """
    if not run.is_file() and not stored_run.is_alive(RunDirectory.existing(run)):
        stored = stored_run.read_run(run)
        fields: dict[str, object] = {
            "state": stored.state,
            "error": stored.error,
            "step": stored.step,
            "steps": stored.steps,
        }
        words = f"{run}: {stored.state}, step {stored.step}/{stored.steps}" + (
            f"\n{stored.error}" if stored.error else ""
        )
    else:
        answer = query_run(run, lambda connected: connected.status())
        fields = {"state": "running", **dataclasses.asdict(answer)}
        words = _words(run, answer)
    if as_json:
        echo_json(fields)
    else:
        echo(words)
    return 0


@click.command()
@click.argument("run", type=_RUN)
@click.option("--now", is_flag=True, help="At once, without a checkpoint.")
@_as_json
def stop(run: Path, now: bool, as_json: bool) -> int:
    """Stop a running run as ctrl-C does: after the steps under way, with a checkpoint. It does not wait for the end.

    \b
    Examples:
      flexmarl stop runs/first
      flexmarl stop runs/first --now
    """
    graceful = query_run(run, lambda connected: connected.stop(now=now, by="flexmarl stop"))
    how = "after the steps under way, with a checkpoint" if graceful else "at once"
    if as_json:
        echo_json({"checkpoint": graceful})
    else:
        echo(f"{run} stops {how}")
    return 0


@click.command()
@click.argument("run", type=_RUN)
@click.argument("actor", default="launcher")
def logs(run: Path, actor: str) -> int:
    """Print the log of an actor of a run, by default the launcher's; with an address file, its last MiB.

    \b
    Examples:
      flexmarl logs runs/first trainer
      flexmarl logs first.address store
    """
    if run.is_file():
        text = query_run(run, lambda connected: connected.log(actor))
    else:
        text = RunDirectory.existing(run).log_of(actor).read_bytes().decode(errors="replace")
    echo_file(text)
    return 0


@click.command()
@click.argument("run", type=_RUN)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--may",
    "rights",
    type=click.Choice(list(CALLS)),
    multiple=True,
    default=["watch"],
    show_default=True,
    help="watch: status, steps, events and logs. judge: this, and its samples. submit: watch, and submit queries. "
    "stop: watch, and stop. May be repeated.",
)
def admit(run: Path, file: Path, rights: tuple[Right, ...]) -> int:
    """Write FILE, with which another user, host or service reaches a running run, and may do no more than --may.

    The run has to listen over TCP (network.listen). FILE is a secret, and good until the run ends; runs/NAME/address
    itself may do everything.

    \b
    Examples:
      flexmarl admit runs/first dashboard.address
      flexmarl admit runs/first judge.address --may judge
    """
    query_run(run, lambda connected: connected.admit(file, rights))
    echo(f"{file}: its holder may {' and '.join(dict.fromkeys(('watch', *rights)))} {run}, until it ends")
    return 0


def _words(run: Path, run_status: RunStatus) -> str:
    instances = ", ".join(f"{name} x{count}" for name, count in run_status.instances.items())
    lines = [
        f"{run}: running for {duration(run_status.since_s)}, step {run_status.step}/{run_status.steps}",
        f"phase      {run_status.phase}",
        f"policies   {instances}",
        *(
            [f"nothing has ended for {duration(run_status.idle_s)}; the run waits for"]
            if run_status.causes
            else []
        ),
        *(f"  {cause}" for cause in run_status.causes),
        *(
            f"{name:<12} pid {process.pid:<8} {process.rss_mib:>9.1f} MiB  {process.host}".rstrip()
            for name, process in run_status.processes.items()
        ),
    ]
    return "\n".join(lines)
