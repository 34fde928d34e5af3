"""The command ``flexmarl status``.

RUN is the folder of a run, or an address file of it: ``runs/NAME/address``, or one that ``flexmarl admit`` has written.
With such a file the command works from every host that reaches the run.
"""

import dataclasses
from pathlib import Path

import click

from ..monitoring.console.echo import echo, echo_json
from ..monitoring.formatting import duration
from ..monitoring.slowness.words import finding_lines
from ..run.connected_run import query_run
from ..run.run_control import RunStatus
from ..run_folder import stored_run
from ..run_folder.run_directory import RunDirectory
from ..run_folder.run_findings import run_findings
from .options import RUN, as_json_option


@click.command()
@click.argument("run", type=RUN)
@as_json_option
def status(run: Path, as_json: bool) -> int:
    """Show step, phase and processes of a running run; of another one, its state and last step.

    \b
    Examples:
      flexmarl status runs/first
      flexmarl status first.address
    """
    if not run.is_file() and not stored_run.is_alive(RunDirectory.existing(run)):
        stored = stored_run.read_run(run)
        causes = run_findings(RunDirectory(run), stored.config)
        fields: dict[str, object] = {
            "state": stored.state,
            "error": stored.error,
            "step": stored.step,
            "steps": stored.steps,
            "findings": [dataclasses.asdict(finding) for finding in causes],
        }
        lines = [f"{run}: {stored.state}, step {stored.step}/{stored.steps}"]
        lines += [stored.error] if stored.error else []
        words = "\n".join(lines + finding_lines(causes))
    else:
        answer = query_run(run, lambda connected: connected.status())
        fields = {"state": "running", **dataclasses.asdict(answer)}
        words = words_of(run, answer)
    if as_json:
        echo_json(fields)
    else:
        echo(words)
    return 0


def words_of(run: Path, run_status: RunStatus) -> str:
    """Returns the lines that the command prints of a running run."""
    instances = ", ".join(f"{name} x{count}" for name, count in run_status.instances.items())
    lines = [
        f"{run}: running for {duration(run_status.since_s)}, step {run_status.step}/{run_status.steps}",
        f"phase      {run_status.phase}",
        f"policies   {instances}",
        *([f"page       {run_status.page}"] if run_status.page else []),
        *(
            [f"nothing has ended for {duration(run_status.idle_s)}; the run waits for"]
            if run_status.causes
            else []
        ),
        *(f"  {cause}" for cause in run_status.causes),
        *finding_lines(run_status.findings),
        *(
            f"{name:<12} pid {process.pid:<8} {process.rss_mib:>9.1f} MiB  {process.host}".rstrip()
            for name, process in run_status.processes.items()
        ),
    ]
    return "\n".join(lines)
