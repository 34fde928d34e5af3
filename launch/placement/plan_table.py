"""A plan as a table: each actor with its node, GPUs, cores and the memory that is known."""

from collections.abc import Sequence

from rich.table import Table

from ..host_description import HostDescription
from .needed import Placed, Plan

_NOT_KNOWN = "?"


def plan_table(plan: Plan, hosts: Sequence[HostDescription]) -> Table:
    """One row for each actor. Memory: the part of it that is certain."""
    table = Table(title="Placement", title_justify="left")
    for column in ("actor", "node", "GPUs", "cores", "memory", "memory of each GPU"):
        table.add_column(column, justify="right" if column in ("cores",) else "left")
    by_name = {host.name: host for host in hosts}
    for actor, placed in plan.actors.items():
        table.add_row(actor, *_row(placed, by_name[placed.node]))
    return table


def _row(placed: Placed, host: HostDescription) -> tuple[str, ...]:
    need = placed.need
    gpus = ", ".join(f"{host.gpus[number].index} {host.gpus[number].name}" for number in placed.gpus)
    return (
        placed.node,
        gpus,
        str(need.cores),
        _at_least(need.memory_bytes),
        _at_least(need.gpu_bytes) if placed.gpus else "",
    )


def _at_least(size: int) -> str:
    return f">= {size / 2**30:.1f} GiB" if size else _NOT_KNOWN
