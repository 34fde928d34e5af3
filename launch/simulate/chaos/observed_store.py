"""The store, and a record of its promises: when it ends, killed or not, its journal has to hold all of them.

And of a promise to it: a policy is saved for a checkpoint only when the store has the commit of its last step. Else a
run that ends in between has samples that are trained and not consumed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ....actors.messages import GroupClosed
from ....actors.names import PolicyName
from ....actors.store.row import Row
from ....actors.store.store import Store
from ....actors.store.store_journal import HEAD
from ....actors.store.store_setup import StoreSetup
from ....actors.store.table import Table
from ....core.actor import endpoint
from ....core.durable.files import open_private
from ....core.durable.record_file import read_records
from ...run_folder.run_directory import RunDirectory
from .saved_policies import newest_version

OBSERVED_STORE: Final = f"{__name__}:ObservedStore"


class ObservedStore(Store):
    """A store whose acknowledged rows, commits and ends of writers are compared with its journal at its end."""

    def __init__(self, setup: StoreSetup) -> None:
        super().__init__(setup)
        self._run = setup.store_dir.parent
        self._acknowledged: dict[str, str] = {}
        """The agent of each sample."""
        self._committed: dict[PolicyName, int] = {}
        self._retired: list[str] = []

    @endpoint
    async def put(
        self, writer: str, parts: dict[str, dict[str, Any]], report: GroupClosed | None = None
    ) -> None:
        await super().put(writer, parts, report)
        for agent, columns in parts.items():
            self._acknowledged |= dict.fromkeys(columns["sample_id"], agent)

    @endpoint
    async def commit(self, policy: PolicyName, fences: list[int], policy_version: int) -> int:
        saved = newest_version(RunDirectory(self._run), policy)
        if saved >= policy_version:
            _add_lines(
                early_checkpoints(self._run),
                [f"version {saved} of policy {policy} before the commit of {policy_version}"],
            )
        rows = await super().commit(policy, fences, policy_version)
        self._committed[policy] = self._committed.get(policy, 0) + rows
        return rows

    @endpoint
    async def retire(self, writer: str) -> list[GroupClosed]:
        reports = await super().retire(writer)
        self._retired.append(writer)
        return reports

    async def on_stop(self) -> None:
        await super().on_stop()
        _add_lines(lost_writes(self._run), self._find_lost())

    def _find_lost(self) -> list[str]:
        """Acknowledged rows that a store which starts with this journal would not have, nor have had; commits that it
        would not count; and retired writers from which it would accept rows."""
        again = Store(self._setup)

        def read(record: bytes) -> bool:
            again._read(record)
            return True

        read_records(self._setup.store_dir / "samples.journal", HEAD, read)
        tables, now = again._tables, self._tables
        lost = [
            f"{sample} of agent {agent}"
            for sample, agent in self._acknowledged.items()
            if sample in now.table(agent) and not _has(tables.table(agent), now.table(agent)[sample])
        ]
        consumed = {agent: counts.consumed for agent, counts in tables.counts().items()}
        for policy, rows in self._committed.items():
            agents = [agent for agent, of in self._setup.policies.items() if of == policy]
            if sum(consumed[agent] for agent in agents) < rows:
                lost.append(f"{rows} rows that policy {policy} has committed")
        # None of the other checks sees it before such a writer puts something, which is rare.
        lost += [f"the end of writer {name}" for name in self._retired if not again._writers.is_retired(name)]
        return lost


def _has(table: Table, row: Row) -> bool:
    """True if the table has this row with its content; that of a row that is over has been freed."""
    sample = row.sample_id
    return sample in table and (row.is_over or table[sample].is_over or table[sample].cells == row.cells)


def lost_writes(run: Path) -> Path:
    """The file that names the lost writes of the run in the folder ``run``. A run without any has no such file."""
    return _beside(run, "lost_writes")


def early_checkpoints(run: Path) -> Path:
    """The file that names the policies that were saved before the store had their commits, in the same way."""
    return _beside(run, "early_checkpoints")


def _beside(run: Path, what: str) -> Path:
    # Not in the folder, of which a loss of power leaves a part.
    return run.with_name(f"{run.name}_{what}.txt")


def _add_lines(file: Path, lines: Sequence[str]) -> None:
    if lines:
        with open_private(file, "a") as opened:
            opened.write("".join(f"{line}\n" for line in lines))
