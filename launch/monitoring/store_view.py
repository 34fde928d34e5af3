"""``flexmarl store``: samples in the store of a run, as a table. A running run's store is asked, that of another one is
read from its journal."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.table import Table

from ...actors.errors import StoreError
from ...actors.messages import Selection
from ...actors.store import query
from ...actors.store.stored_tables import stored_tables
from ...actors.store.tables import Tables
from ...core.errors import JournalError
from ..config.config_reading import check, read_yaml
from ..errors import RunDirectoryError, SamplesUnreadable
from ..run.connected_run import ConnectedRun, query_run
from ..run_folder import stored_run
from ..run_folder.run_directory import RunDirectory
from ..run_folder.samples import conversation
from ..run_folder.samples.reader import Samples
from .console.terminal import Terminal

_PIPED_WIDTH = 240
# Columns that the sample id repeats are left out of the table.
_HIDDEN = frozenset({"step", "group", "query", "query_position", "turn", "trajectory", "group_size"})


def select(run: Path, where: str, limit: int) -> Selection:
    """``run``: a folder, or an address file. Raises RunDirectoryError if the run has no store, RunUnreachable if it is
    just starting or ending, StoreError if ``where`` is not a valid expression."""

    def read_journal(tables: Tables) -> Selection:
        return query.select(tables.scalar_columns(), [*tables.scalars()], where, limit=limit)

    return _ask_or_read(run, lambda connected: connected.select(where, limit), read_journal)


def trajectory(run: Path, name: str) -> Selection:
    """The turns of a trajectory in the tables of all agents. Raises as ``select``, StoreError if nothing in the store
    has that name."""

    def read_journal(tables: Tables) -> Selection:
        return Selection(rows := tables.trajectory(name), len(rows))

    return _ask_or_read(run, lambda connected: connected.trajectory(name), read_journal)


def show(selection: Selection) -> None:
    """Prints the rows as a table, without columns that are empty or that the sample id repeats, and their number."""
    console = Terminal()
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    if selection.rows:
        table = Table()
        # Columns without a value in any row would only take room.
        names = [
            name
            for name in selection.rows[0]
            if name not in _HIDDEN and any(row[name] not in (None, "") for row in selection.rows)
        ]
        for name in names:
            # Never folded, however narrow the terminal: --trajectory takes it.
            table.add_column(name, no_wrap=name == "sample_id", overflow="fold")
        for row in selection.rows:
            table.add_row(*("" if row[name] is None else str(row[name]) for name in names))
        console.print(table)
    console.print(f"{len(selection.rows)} of {selection.total} samples")


def show_conversation(run: Path, selection: Selection) -> None:
    """Prints the trajectory with these turns as ``flexmarl samples`` does, with the turns that are not trained, if the
    run has recorded it. ``run``: as for ``select``; an address has no recorded trajectories."""
    if run.is_file():
        return
    first = selection.rows[0]
    step, query, number = (first[name] for name in ("step", "query", "trajectory"))
    try:
        with Samples(run) as samples:
            recorded = samples.trajectories(step=step, query=query, evaluation=False)
    except SamplesUnreadable:  # the rows are there without it
        recorded = []
    for trajectory in recorded:
        if (trajectory.query.id, trajectory.number) == (query, number):
            conversation.show(Terminal(), trajectory)


def _ask_or_read(
    run: Path,
    question: Callable[[ConnectedRun], Awaitable[Selection]],
    read_journal: Callable[[Tables], Selection],
) -> Selection:
    if run.is_file() or stored_run.is_alive(RunDirectory.existing(run)):
        return query_run(run, question)
    return read_journal(_stored_tables(RunDirectory.existing(run)))


def _stored_tables(directory: RunDirectory) -> Tables:
    config = check(read_yaml(directory.config), str(directory.config))
    policies = {name: agent.policy for name, agent in config.trained_agents.items()}
    journal = directory.store / "samples.journal"
    try:
        return stored_tables(journal, policies, config.columns())
    except FileNotFoundError:
        raise RunDirectoryError(f"{directory.path} has no store: has the run begun?") from None
    except (JournalError, StoreError) as error:
        raise RunDirectoryError(f"{journal} can't be read: {error}") from None
