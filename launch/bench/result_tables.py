"""Shows a benchmark: its progress on standard error, its tables on standard output."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..monitoring.formatting import compact

# Above this load by other programs the figures are not reliable.
_BUSY_PERCENT = 10
_TITLES = {"ipc": "ipc", "tcp_curve": "TCP with CURVE"}


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Shows progress by a bar on a terminal, else by lines. Yields a function to be called before each part."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    text = TextColumn("{task.description}", markup=False)
    # No refresh thread: it would disturb the measurement. The bar is drawn between two parts.
    with Progress(text, *columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        begun = 0

        def report(description: str) -> None:
            nonlocal begun
            bar.update(task, description=description, completed=begun)
            bar.refresh()
            begun += 1

        yield report


def calls_tables(console: Console, result: Mapping[str, Any]) -> None:
    for transport, title in _TITLES.items():
        if transport in result:
            console.print(_goals_table(title, result[transport]["goals"]))
    if result["others"]:
        console.print(_others_table(result))
    _warn_if_busy(console, result)


def _warn_if_busy(console: Console, result: Mapping[str, Any]) -> None:
    if (busy := result["machine"]["busy_percent"]) > _BUSY_PERCENT:
        console.print(
            Text(f"The machine was {busy:.0f} % busy with other things: measure again.", style="yellow")
        )


def pipeline_tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(_goals_table("pipeline, simulated engines", result["goals"], "sync, bound"))
    shares = result["load"]["core_share"].items()
    turns_per_s = compact(result["load"]["turns_per_s"])
    words = ", ".join(f"{name} {share:.2f}" for name, share in shares)
    console.print(Text(f"cores at 1,000 turns/s (measured at {turns_per_s}): {words}"))
    _warn_if_busy(console, result)


def router_tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(_goals_table("router, 8 workers and 512 instances", result["goals"], "empty call"))
    _warn_if_busy(console, result)


def balance_tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(_goals_table("16 instances, 4 policies, simulated engines", result["goals"], "static"))
    table = Table()
    table.add_column("")
    table.add_column("step, s", justify="right")
    table.add_column("queue p99, s", justify="right")
    for key in ("static", "intra", "inter", "best_static"):
        figures = (result[f"{key}_s"], result[f"{key}_queue_p99_s"])
        table.add_row(key.replace("_", " "), *map(compact, figures))
    table.add_row("lower bound", compact(result["lower_bound_s"]), "")
    console.print(table)
    for figures in result["rounds"]:
        best = ", ".join(f"{policy} {count}" for policy, count in figures["best_partition"].items())
        console.print(Text(f"seed {figures['seed']}: {figures['moves']} moves; best static: {best}"))


def pool_tables(console: Console, result: Mapping[str, Any]) -> None:
    for name, figures in result["mixes"].items():
        title = f"{name}: {figures['slots']} slots, {figures['ranks']} ranks"
        console.print(_goals_table(title, figures["goals"], "static, bound, shared"))
        swaps = f"{figures['suspensions']:.1f} suspensions per step"
        console.print(Text(f"{swaps}, {100 * figures['swap_share']:.1f} % of the slots' time lost to swaps"))
    console.print(_goals_table("three policies in turns on one slot", result["goals"]))
    console.print(Text(f"with memory for one state: {compact(result['turns']['without_prefetch'])}"))


def store_tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(_goals_table("experience store", result["goals"]))


def swap_tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(_goals_table("policies on a slot worker", result["goals"], "memcpy"))
    switch = f"{compact(result['switch_ms'])} ms from one policy with 100 MB of state to another"
    gangs = f"{compact(result['switch_gang_ms'])} ms with two ranks each"
    console.print(Text(f"{switch}, {result['cycles']:g} times there and back; {gangs}"))
    _warn_if_busy(console, result)


def tensors_tables(console: Console, result: Mapping[str, Any]) -> None:
    for size, figures in result["by_size"].items():
        console.print(_goals_table(f"states of {int(size) >> 20} MiB", figures["goals"], "memcpy"))
    _warn_if_busy(console, result)


def network_tables(console: Console, result: Mapping[str, Any]) -> None:
    size = f"{result['settings']['size_bytes'] >> 20} MiB"
    console.print(_goals_table(f"between hosts, states of {size}", result["goals"]))
    console.print(
        Text(f"{result['network']}; {compact(result['get_gb_s'])} GB/s, bare {compact(result['bare_gb_s'])}")
    )
    _warn_if_busy(console, result)


def start_tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(_goals_table(f"start of a run, {result['nodes']} nodes", result["goals"]))
    one, two = compact(result["one_host_s"]), compact(result["two_nodes_s"])
    console.print(Text(f"{result['network']}; first step after {one} s on one host, {two} s with a node"))
    _warn_if_busy(console, result)


def rollout_tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(_goals_table(", ".join(result["contenders"].values()), result["goals"], "beside"))
    gap, whole, step = (compact(result[key]) for key in ("gap_ms", "gap_in_one_piece_ms", "step_ms"))
    words = f"at most {gap} ms between two tokens of running turns, {whole} without chunks; {step} as a rule"
    console.print(Text(f"while the longest prompt arrives: {words}"))
    _warn_if_busy(console, result)


def _goals_table(title: str, goals: list[dict[str, Any]], beside: str = "bare") -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for column in ("measured", beside, "ratio"):
        table.add_column(column, justify="right")
    table.add_column("goal")
    table.add_column("")
    for verdict in goals:
        table.add_row(
            verdict["words"],
            compact(verdict["measured"]),
            "" if verdict["bare"] is None else compact(verdict["bare"]),
            "" if verdict["ratio"] is None else f"{verdict['ratio']:.2f}",
            verdict["goal"],
            "[green]met" if verdict["met"] else "[red]not met",
        )
    return table


def _others_table(result: Mapping[str, Any]) -> Group:
    table = Table(title="in the same run", title_justify="left", title_style="bold")
    for number, column in enumerate(("", "p50 us", "p99 us", "calls/s", "start to first reply")):
        table.add_column(column, justify="right" if number else "left")
    own = result.get("ipc") or result.get("tcp_curve")
    if own:
        figures = (own["call_p50_us"], own["call_p99_us"], own["calls_per_s"])
        table.add_row("flexmarl", *map(compact, figures), f"{own['spawn_first_reply_s']:.2f} s")
    missing, notes = [], []
    for library, figures in result["others"].items():
        if figures is None:
            missing.append(library)
        elif "error" in figures:
            table.add_row(library, "failed")
            notes.append(f"{library}: {figures['error']}")
        else:
            shown = (figures["call_p50_us"], figures["call_p99_us"], figures["calls_per_s"])
            first_reply = f"{figures['start_first_reply_s']:.2f} s"
            table.add_row(f"{library} {figures['version']}", *map(compact, shown), first_reply)
    if missing:
        notes.append(f"not installed: {', '.join(missing)} ({result['others_install']})")
    return Group(table, *map(Text, notes))  # as Text: brackets are not markup
