"""The launcher's actor that keeps the run's recorded trajectories.

    one call at a time    uses the file, in a thread; the end of the actor waits for it (``core/base/threads.py``)
    locked                by another process: the call tries again for ``LOCK_PATIENCE_S``, between calls of the thread
    damaged               it is kept under another name, and a new file takes its place
    any other trouble     the call's records are lost, and counted; the next call opens the file again

The user hears of the first loss, and of its end.
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import BeforeValidator, Field

from ....actors.compared_logprobs import unpack_compared
from ....actors.config_base import Config, Count, Natural, Unit, no_bool
from ....actors.messages import ArchiveApi
from ....actors.recorded_trajectory import unpack_record
from ....core.actor import Actor, endpoint
from .sample_file import SampleFile, is_damage, is_locked, put_aside

_MIB: Final = 2**20
LOCK_PATIENCE_S: Final = 30.0
_RETRY_S: Final = 0.1

Result = TypeVar("Result")


class SamplesConfig(Config):
    """The recorded trajectories."""

    steps: Annotated[Natural, Unit("steps")] = 50
    """Last steps of training whose trajectories are kept, with those of all evaluations. 0 records none."""
    trainer_logprobs: Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1)] = 1.0
    """Share of the queries whose trained tokens are recorded with the trainer's log-probabilities beside the engine's,
    by 2 bytes a token. 0 records none."""
    limit_mib: Annotated[Count, Unit("MiB")] = 2048
    """Largest size of the file. The oldest steps go first, and when evaluations alone fill it, no more is recorded."""

    @property
    def compared_share(self) -> float:
        """Share of the queries whose trained tokens are compared: none if no trajectories are recorded."""
        return self.trainer_logprobs if self.steps else 0.0


class Archive(Actor, ArchiveApi):
    """A file that can't be written costs records, which are counted, never the run."""

    def __init__(self, path: Path, config: SamplesConfig, after: int, warn: Callable[[str], None]) -> None:
        """``after``: the last step that the run keeps, 0 for a new one. ``warn``: gets one line for the user, the first
        time that something is lost."""
        self._path, self._config, self._after = path, config, after
        self._warn = warn
        self._is_losing = self._is_full = False
        self._replaced: list[Path] = []
        """Damaged files under their new names, of which the user has not heard."""
        self._file: SampleFile | None = None
        self._is_repeated = False
        """The steps that the run repeats are removed."""
        self._writing = asyncio.Lock()

    async def on_start(self) -> None:
        try:
            await self.system.run_blocking(self._add, [], 0)
        except (sqlite3.Error, OSError) as error:
            if not is_locked(error):  # by a reader, say, who is gone when there is something to keep
                self._losing(f"{self._path} can't be written, trajectories are not recorded: {error}")
        self._say_replaced()

    async def on_stop(self) -> None:
        async with self._writing:  # a cancelled call holds it until its thread has left the file
            await self.system.run_blocking(self._close)

    @endpoint
    async def keep(self, records: list[bytes], dropped: int) -> int:
        return await self._keep(partial(self._add, records, dropped), partial(_count, records))

    @endpoint
    async def keep_compared(self, records: list[bytes], dropped: int) -> int:
        return await self._keep(partial(self._compare, records, dropped), partial(_count_compared, records))

    async def _keep(self, add: Callable[[], int], count: Callable[[], int]) -> int:
        """``add``: adds records, and returns how many entries are refused. ``count``: of all their entries."""
        async with self._writing:
            try:
                refused = await self._when_unlocked(add)
            except (sqlite3.Error, OSError, ValueError) as error:
                self._losing(f"trajectories are not recorded: {self._path}: {error}")
                return count()
        if self._is_losing:
            self._is_losing = False
            self._warn(f"trajectories are recorded again: {self._path}")
        self._say_replaced()
        if refused and not self._is_full:
            self._is_full = True
            self._warn(
                f"trajectories are not recorded: {self._path} has reached samples.limit_mib={self._config.limit_mib}"
            )
        return refused

    # ------------------------------------------------------------------ inside

    async def _when_unlocked(self, work: Callable[[], Result]) -> Result:
        """The result of ``work``, tried again as long as another process has locked the file."""
        give_up_at = self.system.clock() + LOCK_PATIENCE_S
        while True:
            try:
                return await self.system.run_blocking(work)
            except sqlite3.OperationalError as error:
                if not is_locked(error) or self.system.clock() >= give_up_at:
                    raise
            await asyncio.sleep(_RETRY_S)

    def _losing(self, trouble: str) -> None:
        if not self._is_losing:
            self._is_losing = True
            self._warn(trouble)

    def _say_replaced(self) -> None:
        for aside in self._replaced:
            self._warn(f"{self._path} could not be read, and is {aside.name} now")
        self._replaced.clear()

    # ------------------------------------------------------------------ in a thread

    def _add(self, records: list[bytes], dropped: int) -> int:
        return self._write(lambda file: file.add(records, dropped))

    def _compare(self, records: list[bytes], dropped: int) -> int:
        return self._write(lambda file: file.add_compared(records, dropped))

    def _write(self, add: Callable[[SampleFile], int]) -> int:
        try:
            return add(self._open_file())
        except sqlite3.Error as error:
            if is_locked(error):
                raise
            self._close()  # it may have been moved: a later call opens it
            if not is_damage(error):
                raise
        self._replaced.append(put_aside(self._path))
        return add(self._open_file())

    def _open_file(self) -> SampleFile:
        if self._file is None:
            self._file = SampleFile(self._path, self._config.steps, self._config.limit_mib * _MIB)
            if self._file.replaced is not None:
                self._replaced.append(self._file.replaced)
        if not self._is_repeated:
            self._file.forget_after(self._after)
            self._is_repeated = True
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(sqlite3.Error):  # all that was answered is in the file
                file.close()


def _count(records: list[bytes]) -> int:
    """The number of trajectories in the records; one for each that is invalid."""
    counts = 0
    for record in records:
        try:
            counts += unpack_record(record).trajectories
        except ValueError:
            counts += 1
    return counts


def _count_compared(records: list[bytes]) -> int:
    """The number of samples in the records; one for each that is invalid."""
    counts = 0
    for record in records:
        try:
            counts += sum(group.entries for group in unpack_compared(record))
        except ValueError:
            counts += 1
    return counts
