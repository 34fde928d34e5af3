"""A plan as a table: each actor with its node, GPUs, cores and the memory that is known."""

import io

from rich.table import Table

from ...monitoring.console.terminal import Terminal
from ..host_description import HostDescription
from .plan import Placed
from .run_placement import RunPlacement

_COLUMNS = 110
_NOT_KNOWN = "?"


def plan_table(placement: RunPlacement) -> Table:
    """One row for each actor. Memory: the part of it that is certain."""
    table = Table(box=None, pad_edge=False)
    for column in ("actor", "node", "GPUs", "cores", "memory", "on each GPU"):
        table.add_column(column, justify="right" if column == "cores" else "left")
    hosts = {host.name: host for host in placement.hosts}
    for actor, placed in placement.plan.actors.items():
        table.add_row(actor, *_row(placed, hosts[placed.node]))
    return table


def plan_as_comment(placement: RunPlacement) -> str:
    """The table, the hosts and the plan's notes as comments of YAML."""
    text = io.StringIO()
    console = Terminal(file=text, width=_COLUMNS, color_system=None)
    console.print(plan_table(placement))
    notes = [*map(_host, placement.hosts), *placement.plan.notes]
    lines = [*text.getvalue().splitlines(), *notes]
    return "".join(f"# {line.rstrip()}".rstrip() + "\n" for line in ("", *lines, ""))


def _row(placed: Placed, host: HostDescription) -> tuple[str, ...]:
    need = placed.need
    gpus = ", ".join(f"{host.gpus[number].index} {host.gpus[number].name}" for number in placed.gpus)
    on_gpus = _at_least(need.gpu_bytes) if placed.gpus else ""
    return placed.node, gpus, str(need.cores), _at_least(need.memory_bytes), on_gpus


def _host(host: HostDescription) -> str:
    gpus = f"{len(host.gpus)} GPUs" + (f" ({host.gpus_note})" if host.gpus_note else "")
    return f"{host.name}: {host.cores} cores, {host.memory_bytes / 2**30:.1f} GiB of memory, {gpus}"


def _at_least(size: int) -> str:
    return f">= {size / 2**30:.1f} GiB" if size else _NOT_KNOWN
