"""The launcher's actor that keeps the run's recorded trajectories."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ...actors.config_base import Config, Count, Natural
from ...actors.messages import ArchiveApi
from ...actors.recorded_trajectory import unpacked
from ...core.actor import Actor, endpoint
from .sample_file import SampleFile

_MIB: Final = 2**20


class SamplesConfig(Config):
    """The recorded trajectories: those of the last ``steps`` steps and of all evaluations; 0 records none.
    ``limit_mib``: of their file; the oldest steps go first, and when evaluations alone fill it, no more is recorded."""

    steps: Natural = 50
    limit_mib: Count = 2048


class Archive(Actor, ArchiveApi):
    """A file that can't be written costs records, which are counted, never the run."""

    def __init__(self, path: Path, config: SamplesConfig, after: int, warn: Callable[[str], None]) -> None:
        """``after``: the last step that the run keeps, 0 for a new one. ``warn``: gets one line for the user, the first
        time that something is lost."""
        self._path, self._config, self._after = path, config, after
        self._warn = warn
        self._warned = False
        self._file: SampleFile | None = None
        self._writing = asyncio.Lock()

    async def on_start(self) -> None:
        try:
            self._file = await self.system.run_blocking(self._open)
        except (sqlite3.Error, OSError) as error:
            self._warn_once(f"{self._path} can't be written, trajectories are not recorded: {error}")
            return
        if self._file.replaced is not None:
            self._warn_once(f"{self._path} could not be read, and is {self._file.replaced.name} now")

    async def on_stop(self) -> None:
        if self._file is not None:
            await self.system.run_blocking(self._file.close)

    @endpoint
    async def keep(self, records: list[bytes], dropped: int) -> int:
        async with self._writing:
            try:
                refused = await self.system.run_blocking(self._add, records, dropped)
            except (sqlite3.Error, ValueError) as error:
                self._warn_once(f"trajectories are not recorded: {self._path}: {error}")
                return _count(records)
        if refused:
            self._warn_once(
                f"trajectories are not recorded: {self._path} has reached samples.limit_mib={self._config.limit_mib}"
            )
        return refused

    def _open(self) -> SampleFile:
        file = SampleFile(self._path, self._config.steps, self._config.limit_mib * _MIB)
        file.forget_after(self._after)
        return file

    def _add(self, records: list[bytes], dropped: int) -> int:
        if self._file is None:
            raise sqlite3.OperationalError("it could not be opened")
        return self._file.add(records, dropped)

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(text)


def _count(records: list[bytes]) -> int:
    """The number of trajectories in the records; one for each that is invalid."""
    counts = 0
    for record in records:
        try:
            counts += unpacked(record).trajectories
        except ValueError:
            counts += 1
    return counts
