"""``flexmarl store``: samples in the store of a running run, as a table."""

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress

import uvloop
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..actors.messages import Selection, StoreApi
from ..core.errors import ActorDead
from ..core.system import ActorSystem
from ..core.wire.curve import Keys
from .errors import RunDirectoryError
from .run_address import RunAddress
from .run_directory import RunDirectory

_TIMEOUT_S = 30.0
_PIPED_WIDTH = 240
# Columns that the sample id repeats are left out of the table.
_HIDDEN = frozenset({"step", "group", "query", "query_position", "turn", "trajectory"})


def select(directory: RunDirectory, where: str, limit: int) -> Selection:
    """Raises RunDirectoryError if the run has ended, StoreError if ``where`` is not a valid expression."""
    return _ask(directory, lambda store: store.select(where, limit))


def trajectory(directory: RunDirectory, name: str) -> Selection:
    """The turns of a trajectory in the tables of all agents. Raises RunDirectoryError if the run has ended, StoreError
    if nothing in the store has that name."""
    return _ask(directory, lambda store: store.trajectory(name))


def show(found: Selection) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    if found.rows:
        table = Table()
        # Columns without a value in any row would only take room.
        names = [
            name
            for name in found.rows[0]
            if name not in _HIDDEN and any(row[name] not in (None, "") for row in found.rows)
        ]
        for name in names:
            # Never folded, however narrow the terminal: --trajectory takes it.
            table.add_column(name, no_wrap=name == "sample_id", overflow="fold")
        for row in found.rows:
            table.add_row(*("" if row[name] is None else escape(str(row[name])) for name in names))
        console.print(table)
    console.print(f"{len(found.rows)} of {found.total} samples")


def _ask(directory: RunDirectory, question: Callable[[StoreApi], Awaitable[Selection]]) -> Selection:
    try:
        address = directory.store_address.read_text()
    except FileNotFoundError:
        raise RunDirectoryError(f"{directory.path} has no store: has the run begun?") from None
    try:
        return uvloop.run(_answer(address, _keys(directory), question))
    except ActorDead as error:
        raise RunDirectoryError(
            f"the store of {directory.path} can't be read, as the run has ended: {error}"
        ) from None


def _keys(directory: RunDirectory) -> Keys | None:
    """Those of a run that listens over TCP."""
    with suppress(FileNotFoundError):
        return RunAddress.load(directory.control_address).keys
    return None


async def _answer(
    address: str, keys: Keys | None, question: Callable[[StoreApi], Awaitable[Selection]]
) -> Selection:
    async with ActorSystem(f"look-{os.getpid()}", keys=keys) as system:
        return await question(system.ref("store", address, StoreApi).within(_TIMEOUT_S))
