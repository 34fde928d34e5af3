"""Writes ``samples.sqlite``: the trajectories of the last steps, and of all evaluations.

    records         a query's trajectories that came together: step, query, the number of the first trajectory (of an
                    evaluation; else 0), ``rows`` with rewards, failures and metrics, ``content`` with texts and tokens
                    (``actors/recorded_trajectory.py`` opens both)
    compared        of samples of one group, the trainer's log-probabilities: step, query, ``content``
                    (``actors/compared_logprobs.py`` opens it). Of a sample that is there twice, the last one counts: a
                    computation was repeated
    counts          ``dropped``: trajectories that should be here, and are not; ``dropped_compared``: samples without
                    the trainer's log-probabilities

SQLite in WAL mode: readers see the last transaction and delay no write, and kill -9 costs at most the transaction under
way. A record is one row: rows for trajectories and turns took the run six times the time, so a reader makes them, in
its own memory (``reader.py``). Pages of removed steps are used again, so that the file stays as large as the steps that
it keeps. On a network file system WAL is for one host: read it on the run's own.
"""

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ....actors.compared_logprobs import unpack_compared
from ....actors.recorded_trajectory import Record, unpack_record
from ....core.durable.files import open_private

FORMAT: Final = 3
_SCHEMA: Final = """
CREATE TABLE records (
    id INTEGER PRIMARY KEY AUTOINCREMENT, evaluation INTEGER NOT NULL, step INTEGER NOT NULL, query TEXT NOT NULL,
    part INTEGER NOT NULL, text TEXT NOT NULL, rows BLOB NOT NULL, content BLOB NOT NULL,
    UNIQUE (step, evaluation, query, part)
);
CREATE TABLE compared (id INTEGER PRIMARY KEY, step INTEGER NOT NULL, query TEXT NOT NULL, content BLOB NOT NULL);
CREATE INDEX compared_groups ON compared (step, query);
CREATE TABLE counts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""
_DAMAGED: Final = ".damaged"
LOCK_WAIT_S: Final = 0.25
"""The longest time for which a call waits for a lock."""


class SampleFile:
    """For one thread at a time. Every method but ``close`` raises sqlite3.Error if the file can't be written; then
    nothing has changed."""

    def __init__(self, path: Path, kept_steps: int, limit_bytes: int) -> None:
        """``limit_bytes``: of the file; the oldest steps go first, then nothing more is taken. Makes the file if it is
        missing, and in place of one that can't be read, which is kept beside it under another name."""
        self._kept_steps, self._limit_bytes = kept_steps, limit_bytes
        self.replaced: Path | None = None
        """The file that could not be read."""
        try:
            self._database = _open(path)
        except sqlite3.OperationalError:  # it is locked, or the disk is full: the file may be whole
            raise
        except sqlite3.DatabaseError:
            self.replaced = put_aside(path)
            self._database = _open(path)
        try:
            (self._page_bytes,) = self._database.execute("PRAGMA page_size").fetchone()
            self._newest = self._newest_step()
        except BaseException:
            self._database.close()
            raise

    def forget_after(self, step: int) -> None:
        """Removes the later steps and their evaluations: a resumed run repeats them."""
        with self._database:
            self._database.execute("DELETE FROM records WHERE step > ?", (step,))
            self._database.execute("DELETE FROM compared WHERE step > ?", (step,))
        self._newest = self._newest_step()

    def add(self, records: Sequence[bytes], dropped: int = 0) -> int:
        """Adds records in one transaction; ``dropped``: further trajectories, to be counted. Returns how many
        trajectories are refused, because the file has reached its limit."""
        unpacked_records = [*map(unpack_record, records)]
        refused = 0
        with self._database:
            for record in unpacked_records:
                if not self._has_room(record.size, 0 if record.evaluation else record.step):
                    refused += record.trajectories
                    continue
                self._insert(record)
            self._count("dropped", refused + dropped)
        return refused

    def add_compared(self, records: Sequence[bytes], dropped: int = 0) -> int:
        """The same for the trainer's log-probabilities; counts samples. Those of steps that are kept no more are left
        out."""
        groups = [group for record in records for group in unpack_compared(record)]
        refused = 0
        with self._database:
            for group in groups:
                if group.step <= self._newest - self._kept_steps:
                    continue
                if not self._has_room(len(group.content), group.step):
                    refused += group.entries
                    continue
                self._database.execute(
                    "INSERT INTO compared VALUES (NULL, ?, ?, ?)", (group.step, group.query, group.content)
                )
            self._count("dropped_compared", refused + dropped)
        return refused

    def close(self) -> None:
        """Makes the file readable in a folder that can't be written, and closes it. Raises nothing: its content is safe
        anyway."""
        try:
            # From now on one file, which is read without others beside it: in folders that can't be written too.
            # It fails if a reader is there, the disk is full, or the file is damaged.
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("PRAGMA journal_mode = DELETE")
        finally:
            self._database.close()

    # ------------------------------------------------------------------ inside

    def _count(self, name: str, more: int) -> None:
        if more:
            self._database.execute(
                "INSERT INTO counts VALUES (?1, ?2) ON CONFLICT DO UPDATE SET value = value + ?2",
                (name, more),
            )

    def _insert(self, record: Record) -> None:
        self._database.execute(
            "INSERT OR REPLACE INTO records VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)",
            (
                record.evaluation, record.step, record.query, record.number if record.evaluation else 0,
                storable(record.text), record.rows, record.content,
            ),
        )  # fmt: skip
        if not record.evaluation and record.step > self._newest:
            self._newest = record.step
            self._forget_before(record.step - self._kept_steps + 1)

    def _forget_before(self, step: int) -> None:
        self._database.execute("DELETE FROM records WHERE evaluation = 0 AND step < ?", (step,))
        self._database.execute("DELETE FROM compared WHERE step < ?", (step,))

    def _newest_step(self) -> int:
        (newest,) = self._database.execute("SELECT max(step) FROM records WHERE evaluation = 0").fetchone()
        return newest or 0

    def _has_room(self, more_bytes: int, step: int) -> bool:
        """Makes room for ``more_bytes`` of ``step`` (0: of an evaluation) by removing the oldest steps of training, but
        the newest; False if that is not enough."""
        newest = max(self._newest, step)
        while self._used_bytes() + more_bytes > self._limit_bytes:
            (oldest,) = self._database.execute(
                "SELECT min(step) FROM records WHERE evaluation = 0"
            ).fetchone()
            if oldest is None or oldest >= newest:
                return False
            self._forget_before(oldest + 1)
        return True

    def _used_bytes(self) -> int:
        ((pages,), (free,)) = (
            self._database.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count")
        )
        return int((pages - free) * self._page_bytes)


def put_aside(path: Path) -> Path:
    """Renames a damaged file, with those that SQLite has beside it; returns its new path."""
    aside, number = path.with_name(path.name + _DAMAGED), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}{_DAMAGED}-{number}")
    for end in ("", "-wal", "-shm"):
        part = path.with_name(path.name + end)
        if part.exists():
            part.replace(aside.with_name(aside.name + end))
    return aside


def is_locked(error: BaseException) -> bool:
    """True if another process has locked the file, so that a later try may be better."""
    return _code(error) == sqlite3.SQLITE_BUSY


def is_damage(error: BaseException) -> bool:
    """True if the file itself is at fault."""
    return _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _code(error: BaseException) -> int | None:
    """SQLite's code, without its extension; None for other errors."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else int(code) & 0xFF


def _open(path: Path) -> sqlite3.Connection:
    open_private(path, "ab").close()  # SQLite follows a link, and makes a file as the umask says
    # A short wait for a lock: a thread in it can't be cancelled, so that a longer wait is its caller's, between calls.
    database = sqlite3.connect(path, timeout=LOCK_WAIT_S, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")  # in WAL mode: whole after a crash of the machine too
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT):
            raise sqlite3.DatabaseError(f"it is of format {version}, and this program writes format {FORMAT}")
        if version == 0:
            database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
    except BaseException:
        database.close()
        raise
    return database


def storable(text: str) -> str:
    """``text`` as SQLite takes it: with a sign in place of halves of surrogates."""
    return text.encode(errors="replace").decode()
