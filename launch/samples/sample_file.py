"""Writes ``samples.sqlite``: the trajectories of the last steps, and of all evaluations.

    records         a query's trajectories that came together: step, query, and the texts and tokens, compressed
    trajectories    one row each: reward, failure, metrics
    samples         one row for each turn: agent, reward, advantage, version
    counts          ``dropped``: trajectories that should be here, and are not

SQLite in WAL mode: readers see the last transaction and delay no write, and kill -9 costs at most the transaction under
way. Filters read small rows alone: they find a few of 100,000 samples in a fiftieth of the time that decompressing and
parsing lines of JSON takes (``scripts/bench/samples.py``). Pages of removed steps are used again, so that the file
stays as large as the steps that it keeps. On a network file system WAL is for one host: read it on the run's own.
"""

import contextlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Final

from ...actors.recorded_trajectory import Record, TrajectoryRow, unpacked

FORMAT: Final = 1
_SCHEMA: Final = """
CREATE TABLE records (
    id INTEGER PRIMARY KEY, evaluation INTEGER NOT NULL, step INTEGER NOT NULL, query TEXT NOT NULL,
    part INTEGER NOT NULL, text TEXT NOT NULL, content BLOB NOT NULL, UNIQUE (step, evaluation, query, part)
);
CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY, record INTEGER NOT NULL REFERENCES records ON DELETE CASCADE, place INTEGER NOT NULL,
    number INTEGER NOT NULL, reward REAL, rewards TEXT NOT NULL, metrics TEXT NOT NULL, failure TEXT NOT NULL
);
CREATE INDEX of_record ON trajectories (record, number);
CREATE TABLE samples (
    trajectory INTEGER NOT NULL REFERENCES trajectories ON DELETE CASCADE, turn INTEGER NOT NULL, agent TEXT NOT NULL,
    reward REAL, advantage REAL, version INTEGER NOT NULL, tokens INTEGER NOT NULL, finish_reason TEXT NOT NULL,
    PRIMARY KEY (trajectory, turn)
) WITHOUT ROWID;
CREATE TABLE counts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""
_DAMAGED: Final = ".damaged"


class SampleFile:
    """For one thread at a time. Every method raises sqlite3.Error if the file can't be written; then nothing has
    changed."""

    def __init__(self, path: Path, kept_steps: int, limit_bytes: int) -> None:
        """``limit_bytes``: of the file; the oldest steps go first, then nothing more is taken. Makes the file if it is
        missing, and in place of one that can't be read, which is kept beside it under another name."""
        self._kept_steps, self._limit_bytes = kept_steps, limit_bytes
        self.replaced: Path | None = None
        """The file that could not be read."""
        try:
            self._database = _opened(path)
        except sqlite3.OperationalError:  # it is locked, or the disk is full: the file may be whole
            raise
        except sqlite3.DatabaseError:
            self.replaced = _put_aside(path)
            self._database = _opened(path)
        (self._page_bytes,) = self._database.execute("PRAGMA page_size").fetchone()
        self._newest = self._newest_step()
        (newest_id,) = self._database.execute("SELECT max(id) FROM trajectories").fetchone()
        self._next_id = (newest_id or 0) + 1

    def forget_after(self, step: int) -> None:
        """Removes the later steps and their evaluations: a resumed run repeats them."""
        with self._database:
            self._database.execute("DELETE FROM records WHERE step > ?", (step,))
        self._newest = self._newest_step()

    def add(self, records: Sequence[bytes], dropped: int = 0) -> int:
        """Adds records in one transaction; ``dropped``: further trajectories, to be counted. Returns how many
        trajectories are refused, because the file has reached its limit."""
        found = [*map(unpacked, records)]
        refused = 0
        with self._database:
            for record in found:
                if not self._has_room(len(record.content), 0 if record.evaluation else record.step):
                    refused += len(record.trajectories)
                    continue
                self._insert(record)
            if refused or dropped:
                self._database.execute(
                    "INSERT INTO counts VALUES ('dropped', ?1) ON CONFLICT DO UPDATE SET value = value + ?1",
                    (refused + dropped,),
                )
        return refused

    def close(self) -> None:
        with contextlib.suppress(sqlite3.OperationalError):  # a reader is there
            # From now on one file, which is read without others beside it: in folders that can't be written too.
            self._database.execute("PRAGMA journal_mode = DELETE")
        self._database.close()

    # ------------------------------------------------------------------ inside

    def _insert(self, record: Record) -> None:
        rows = [TrajectoryRow(*row) for row in record.trajectories]
        part = rows[0].number if record.evaluation else 0
        key = (record.evaluation, record.step, record.query, part)
        execute = self._database.execute
        execute("DELETE FROM records WHERE evaluation = ? AND step = ? AND query = ? AND part = ?", key)
        written = execute(
            "INSERT INTO records VALUES (NULL, ?, ?, ?, ?, ?, ?)", (*key, _text(record.text), record.content)
        )
        first, self._next_id = self._next_id, self._next_id + len(rows)
        self._database.executemany(
            "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    first + place, written.lastrowid, place, row.number, row.reward, _object(row.rewards),
                    _object(row.metrics), _text(row.failure),
                )
                for place, row in enumerate(rows)
            ],
        )  # fmt: skip
        self._database.executemany(
            "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(first + place, *sample) for place, row in enumerate(rows) for sample in row.samples],
        )
        if not record.evaluation and record.step > self._newest:
            self._newest = record.step
            self._forget_before(record.step - self._kept_steps + 1)

    def _forget_before(self, step: int) -> None:
        self._database.execute("DELETE FROM records WHERE evaluation = 0 AND step < ?", (step,))

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


def _put_aside(path: Path) -> Path:
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


def _opened(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")  # in WAL mode: whole after a crash of the machine too
        database.execute("PRAGMA foreign_keys = ON")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT):
            raise sqlite3.DatabaseError(f"it is of format {version}, and this program writes format {FORMAT}")
        if version == 0:
            database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
    except BaseException:
        database.close()
        raise
    return database


def _object(values: Mapping[str, float]) -> str:
    """As ``json.dumps``, in a fifth of its time: that makes an encoder for each call."""
    if not all(type(value) is float and isfinite(value) for value in values.values()):
        return json.dumps(values)
    return "{" + ", ".join([f"{_key(name)}: {value!r}" for name, value in values.items()]) + "}"


@lru_cache(maxsize=1024)
def _key(name: str) -> str:
    return json.dumps(name)


def _text(text: str) -> str:
    """``text`` as SQLite takes it: with a sign in place of halves of surrogates."""
    return text.encode(errors="replace").decode()
