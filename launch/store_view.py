"""``flexmarl store``: what people see of a running store."""

import dataclasses
import json
import os

import click
import uvloop
from rich.console import Console
from rich.table import Table

from ..actors.messages import Selection, StoreApi
from ..core.errors import ActorDead, RemoteError, RunDirectoryError, StoreError
from ..core.system import ActorSystem
from .run_directory import RunDirectory

_TIMEOUT_S = 30.0
# What a name says already is left out of the table.
_HIDDEN = frozenset({"step", "group", "query", "turn", "trajectory"})


def show(directory: RunDirectory, where: str, limit: int, as_json: bool) -> None:
    """Raises RunDirectoryError where the run does not go on, StoreError where ``where`` is no expression."""
    try:
        address = directory.store_address.read_text()
    except FileNotFoundError:
        raise RunDirectoryError(f"{directory.path} has no store: has the run begun?") from None
    try:
        found = uvloop.run(_select(address, where, limit))
    except ActorDead as error:
        raise RunDirectoryError(
            f"the store of {directory.path} can't be asked, as the run does not go on: {error}"
        ) from None
    except RemoteError as error:
        raise StoreError(error.message) from None
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found)))
    else:
        _print(found)


async def _select(address: str, where: str, limit: int) -> Selection:
    async with ActorSystem(f"look-{os.getpid()}") as system:
        return await system.ref("store", address, StoreApi).within(_TIMEOUT_S).select(where, limit)


def _print(found: Selection) -> None:
    console = Console()
    if found.rows:
        table = Table()
        names = [name for name in found.rows[0] if name not in _HIDDEN]
        for name in names:
            table.add_column(name)
        for row in found.rows:
            table.add_row(*("" if row[name] is None else str(row[name]) for name in names))
        console.print(table)
    console.print(f"{len(found.rows)} of {found.total} samples")
