"""Shows the result of ``flexmarl bench calls``."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..monitoring.formatting import compact
from .result_tables import goals_table, warn_if_busy

_TITLES = {"ipc": "ipc", "tcp_curve": "TCP with CURVE"}


def tables(console: Console, result: Mapping[str, Any]) -> None:
    for transport, title in _TITLES.items():
        if transport in result:
            console.print(goals_table(title, result[transport]["goals"]))
    if result["others"]:
        console.print(_others_table(result))
    warn_if_busy(console, result)


def _others_table(result: Mapping[str, Any]) -> Group:
    table = Table(title="in the same run", title_justify="left", title_style="bold")
    for number, column in enumerate(("", "p50 us", "p99 us", "calls/s", "start to first reply")):
        table.add_column(column, justify="right" if number else "left")
    of_flexmarl = result.get("ipc") or result.get("tcp_curve")
    if of_flexmarl:
        figures = (of_flexmarl["call_p50_us"], of_flexmarl["call_p99_us"], of_flexmarl["calls_per_s"])
        table.add_row("flexmarl", *map(compact, figures), f"{of_flexmarl['spawn_first_reply_s']:.2f} s")
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
