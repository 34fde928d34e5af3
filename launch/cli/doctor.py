"""``flexmarl doctor``: what this machine has for a run, and what a run would stumble over; or several hosts; and the
plan of a run on them."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from ...actors.errors import ConfigError
from ..config.run_config import RunConfig
from ..config.written_config import WrittenConfig
from ..hosts.diagnosis import Diagnosis, diagnose
from ..hosts.nodes.hosts_file import read_hosts
from ..hosts.nodes.probing import HostFinding, probe
from ..hosts.placement.nearest_plan import plan_run
from ..hosts.placement.plan import DoesNotFit
from ..hosts.placement.plan_table import plan_lines
from ..hosts.placement.run_placement import RunPlacement
from ..monitoring.console.echo import echo, echo_json
from ..monitoring.console.terminal import Terminal
from ..run.prepared_run import recipe_and_settings, resolve_given
from .options import FilePath


@click.command()
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY.KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--runs", type=FilePath(), default=Path("runs"), help="The folder of all runs.")
@click.option(
    "--hosts",
    type=FilePath(dir_okay=False),
    metavar="FILE",
    help="Look at these hosts too, by ssh, and compare them: versions, clocks, connections both ways, the folder of "
    "all runs. The file is that of `flexmarl train --hosts`.",
)
def doctor(words: tuple[str, ...], as_json: bool, runs: Path, hosts: Path | None) -> int:
    """Show what this machine has for a run: memory, packages, devices, disk; and what a run would stumble over.

    With RECIPE, as in `flexmarl train`, it shows the place and the memory of each actor of that run too.

    \b
    Examples:
      flexmarl doctor
      flexmarl doctor --json
      flexmarl doctor --runs /shared/runs
      flexmarl doctor --runs /shared/runs --hosts hosts.txt
      flexmarl doctor path/to/recipe pool.slots=4
    """
    resolved = _config_of(words)
    ssh_hosts = () if hosts is None else read_hosts(hosts)
    diagnosis = diagnose(runs)
    findings = asyncio.run(probe(ssh_hosts, diagnosis)) if ssh_hosts else []
    plan = None if resolved is None else _plan(*resolved, diagnosis, findings)
    if as_json:
        listed = [asdict(finding) for finding in findings]
        described = asdict(diagnosis) if hosts is None else {"here": asdict(diagnosis), "hosts": listed}
        echo_json(described if plan is None else {**described, "plan": _as_json(plan)})
    else:
        _show(Terminal(), diagnosis)
        for finding in findings:
            _show_host(Terminal(), finding)
        if plan is not None:
            echo(f"\n{plan}" if isinstance(plan, DoesNotFit) else "\n".join(("", *plan_lines(plan))))
    has_problems = bool(diagnosis.problems) or any(finding.problems for finding in findings)
    return 1 if has_problems or isinstance(plan, DoesNotFit) else 0


def _config_of(words: Sequence[str]) -> tuple[RunConfig, WrittenConfig] | None:
    """The config of the recipe among the words of the command line, and the keys in it; None without one."""
    recipe, settings = recipe_and_settings(words)
    if recipe is None and settings:
        raise ConfigError(f"{settings[0]}: a setting is for a plan, which needs a recipe")
    return None if recipe is None else resolve_given(recipe, settings)


def _plan(
    config: RunConfig, keys: WrittenConfig, diagnosis: Diagnosis, findings: Sequence[HostFinding]
) -> RunPlacement | DoesNotFit:
    """The plan on this host and those that have answered, or its refusal."""
    far_hosts = [
        replace(finding.diagnosis.host, name=finding.name)
        for finding in findings
        if finding.diagnosis is not None
    ]
    hosts = [diagnosis.host, *far_hosts]
    try:
        return plan_run(config, hosts, keys)[1]
    except DoesNotFit as refusal:
        return refusal


def _as_json(plan: RunPlacement | DoesNotFit) -> dict[str, Any]:
    return {"problems": plan.problems} if isinstance(plan, DoesNotFit) else asdict(plan.plan)


def _show(console: Terminal, diagnosis: Diagnosis) -> None:
    table = Table(show_header=False, box=None)
    host = diagnosis.host
    table.add_row("host", host.name)
    table.add_row("user", diagnosis.user)
    table.add_row("python", f"{host.python}, {diagnosis.platform}")
    table.add_row("cores", str(host.cores))
    table.add_row("memory", f"{host.memory_bytes / 2**30:.1f} GiB")
    free, size = host.shared_memory_free_bytes / 2**30, host.shared_memory_bytes / 2**30
    table.add_row("shared memory", f"{free:.1f} of {size:.1f} GiB free in {host.shared_memory}")
    seen = "perhaps seen by other hosts" if diagnosis.runs.shared else "seen by this host alone"
    room = f"{diagnosis.runs.free_bytes / 2**30:.1f} GiB free"
    table.add_row("runs", f"{room} in {diagnosis.runs.path}, {diagnosis.runs.file_system}: {seen}")
    table.add_row(
        "memory to pin", _or_no_limit(diagnosis.locked_bytes and diagnosis.locked_bytes >> 20, " MiB")
    )
    table.add_row("open files", _or_no_limit(diagnosis.open_files, ""))
    for name, installed in {**host.packages, "nvidia-ml-py": diagnosis.nvidia_package}.items():
        table.add_row(name, installed or "not installed")
    for device in diagnosis.nvidia.devices:
        free, total = device.free_bytes / 2**30, device.total_bytes / 2**30
        used = "" if device.utilisation_percent is None else f", {device.utilisation_percent} % busy"
        peers = f", reads {', '.join(device.peers)}" if device.peers else ""
        table.add_row(device.uuid, f"{device.name}: {free:.1f} of {total:.1f} GiB free{used}{peers}")
    if host.gpus_note:
        table.add_row("GPUs", f"{len(host.gpus) or 'none'}: {host.gpus_note}")
    console.print(table)
    for problem in diagnosis.problems:
        console.print(problem, style="yellow", markup=False)


def _show_host(console: Terminal, finding: HostFinding) -> None:
    console.print(f"\n{finding.name} ({finding.destination})", markup=False)
    if finding.diagnosis is not None:
        shown = replace(finding.diagnosis, problems=())  # ``finding`` has them, with the host's name
        _show(console, shown)
    if finding.clock_ahead_s is not None:
        console.print(
            f"clock {finding.clock_ahead_s:+.3f} s against this host's, +- {finding.clock_error_s:.3f} s"
        )
    for problem in finding.problems:
        console.print(problem, style="yellow", markup=False)


def _or_no_limit(limit: int | None, unit: str) -> str:
    return "no limit" if limit is None else f"{limit}{unit}"
