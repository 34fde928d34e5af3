"""A plan as a table: each actor with its node, GPUs, cores and the memory that is known."""

import io
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich.table import Table

from ...monitoring.console.terminal import Terminal
from ..host_description import HostDescription
from .actor_needs import Parts
from .capacity import usable_bytes
from .plan import Placed
from .run_placement import RunPlacement

_COLUMNS = 98  # and a comment sign: 100
_NOT_KNOWN = "?"


def plan_table(placement: RunPlacement) -> Table:
    """One row for each actor, or for several of a kind on one host, which then has the memory of each."""
    table = Table(box=None, pad_edge=False)
    for column in ("actor", "node", "GPUs", "cores", "host memory", "on each GPU"):
        table.add_column(column, justify="right" if column == "cores" else "left")
    hosts = {host.name: host for host in placement.hosts}
    for row, actors in groupby(placement.plan.actors.items(), key=lambda item: _shared_cells(*item)):
        (first, placed), *more = list(actors)
        neighbours = [placed, *(other for _, other in more)]
        name = f"{first} to {more[-1][0]}" if more else first
        gpus = [
            hosts[neighbour.node].gpus[number].index for neighbour in neighbours for number in neighbour.gpus
        ]
        table.add_row(name, placed.node, _listing(gpus), *row[2:])
    return table


def plan_lines(placement: RunPlacement) -> list[str]:
    """The table, the parts of its memory, the hosts and the plan's notes."""
    text = io.StringIO()
    console = Terminal(file=text, width=_COLUMNS, color_system=None)
    console.print(plan_table(placement))
    notes = [*map(_host, placement.hosts), *placement.plan.notes]
    lines = [*text.getvalue().splitlines(), "", *memory_lines(placement), "", *_wrap(notes)]
    return [line.rstrip() for line in lines]


def plan_as_comment(placement: RunPlacement) -> str:
    """``plan_lines`` as comments of YAML."""
    return "".join(f"# {line}".rstrip() + "\n" for line in ("", *plan_lines(placement), ""))


def _wrap(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from textwrap.wrap(text, _COLUMNS - 2, subsequent_indent="  ", break_on_hyphens=False)


def _shared_cells(actor: str, placed: Placed) -> tuple[str, ...]:
    """The kind of an actor and its host, and the cells of its row that it may share with its neighbours."""
    need = placed.need
    on_gpus = _size(need.gpu_bytes) if placed.gpus else ""
    memory = _size(need.memory_bytes + need.shared_bytes)
    return _kind(actor), placed.node, str(need.cores), memory, on_gpus


def _kind(actor: str) -> str:
    return actor.rstrip("0123456789").rstrip("-")


def _listing(numbers: Sequence[int]) -> str:
    """``0, 2-4`` for 0, 2, 3 and 4."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def memory_lines(placement: RunPlacement) -> Iterator[str]:
    """A line for each kind of actor with memory on a GPU: its parts, and what is left on the smallest of its GPUs."""
    hosts = {host.name: host for host in placement.hosts}
    seen: set[tuple[str, Parts]] = set()
    for actor, placed in placement.plan.actors.items():
        need = placed.need
        kind = _kind(actor)
        if not placed.gpus or not need.parts or (kind, need.parts) in seen:
            continue
        seen.add((kind, need.parts))
        smallest = min(usable_bytes(hosts[placed.node].gpus[number]) for number in placed.gpus)
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in need.parts)
        yield from _wrap([f"{kind}, on each GPU: {_gib(need.gpu_bytes)} of {_gib(smallest)} GiB: {parts}"])
    is_shared = any(actor.startswith("slot-") for actor in placement.plan.actors)
    contents = "weights and suspended states" if is_shared else "published weights"
    for placed in placement.plan.actors.values():
        if size := placed.need.shared_bytes:
            yield f"in {hosts[placed.node].shared_memory} of {placed.node}: {_gib(size)} GiB for {contents}"


def _host(host: HostDescription) -> str:
    gpus = f"{len(host.gpus)} GPUs" + (f" ({host.gpus_note})" if host.gpus_note else "")
    names = Counter(gpu.name for gpu in host.gpus)
    listed = "".join(f", {count} x {name}" for name, count in names.items())
    if host.shared_memory_bytes == 0:  # made up
        return f"{host.name}: {gpus}{listed}; the memory of the host is unknown"
    return f"{host.name}: {host.cores} cores, {host.memory_bytes / 2**30:.1f} GiB of memory, {gpus}{listed}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


def _size(size: int) -> str:
    return f"{_gib(size)} GiB" if size else _NOT_KNOWN
