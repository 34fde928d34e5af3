"""Reads the recorded trajectories of a run, while it runs and after its end.

with flexmarl.Samples("runs/first") as samples:
    for trajectory in samples.trajectories(agent="checker", reward="<0.2", limit=3):
        for turn in trajectory.turns:
            print(turn.agent, turn.text, turn.reward)
"""

import math
import sqlite3
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self
from urllib.parse import quote

from ....actors.compared_logprobs import Compared, compared_of
from ....actors.messages import Query
from ....actors.recorded_trajectory import (
    RecordedProgram,
    RecordedTrajectory,
    RecordedTurn,
    rows_of,
    turns_of,
)
from ...config.config_reading import read_yaml
from ...errors import InvalidCondition, SamplesUnreadable
from ..run_directory import RunDirectory
from .conditions import Condition
from .sample_file import FORMAT, storable

Number = str | float
"""A number, or a condition on it: ``<0.2``, ``>=0.5``, ``10-20``."""

Order = Literal["oldest", "newest", "best", "worst"]

# Made from the records' rows, in memory.
_TABLES: Final = """
PRAGMA temp_store = MEMORY;
CREATE TEMP TABLE trajectories (
    record INTEGER NOT NULL, place INTEGER NOT NULL, number INTEGER NOT NULL, reward REAL, failure TEXT NOT NULL,
    PRIMARY KEY (record, place)
) WITHOUT ROWID;
CREATE TEMP TABLE samples (
    record INTEGER NOT NULL, place INTEGER NOT NULL, turn INTEGER NOT NULL, agent TEXT NOT NULL, reward REAL,
    advantage REAL, version INTEGER NOT NULL, tokens INTEGER NOT NULL, finish_reason TEXT NOT NULL,
    PRIMARY KEY (record, place, turn)
) WITHOUT ROWID;
"""
_JOINED: Final = "trajectories t JOIN records r ON r.id = t.record"
_OF_TRAJECTORY: Final = "s.record = t.record AND s.place = t.place"
_OLD_FIRST: Final = "r.step, r.evaluation, r.query, t.number"
_NEW_FIRST: Final = "r.step DESC, r.evaluation DESC, r.query DESC, t.number DESC"
_UNWRITABLE: Final = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY})
_PRIMARY_CODE: Final = 0xFF
"""The bits of SQLite's error codes that the kinds of one error share."""


class TrajectoryListed(NamedTuple):
    """A trajectory as it is listed. ``number``: among those of the query. ``reward``: as of ``RecordedTrajectory``.
    ``turns`` and ``tokens``: how many, of all agents."""

    step: int
    evaluation: bool
    query: str
    number: int
    reward: float | None
    failure: str
    turns: int
    tokens: int


class SampleListed(NamedTuple):
    """A turn as it is listed. ``trajectory``: its number among those of the query. ``tokens``: generated. ``reward``
    and ``advantage``: as in ``RecordedTurn``."""

    step: int
    evaluation: bool
    query: str
    trajectory: int
    turn: int
    agent: str
    reward: float | None
    advantage: float | None
    version: int
    tokens: int
    finish_reason: str
    failure: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """The content of the file. ``first_step`` and ``last_step``: of training, None without any. ``evaluations``: the
    steps that they came after. ``dropped``: trajectories that are missing, because there was no room or no time for
    them."""

    trajectories: int
    samples: int
    first_step: int | None
    last_step: int | None
    evaluations: tuple[int, ...]
    dropped: int


class Samples:
    """``run``: a run's folder. Making it raises RunDirectoryError for another folder, SamplesUnreadable if
    nothing is recorded there; every method raises SamplesUnreadable, which names the file, if that is damaged.

    Filters of all methods: ``step`` and ``reward`` are numbers or conditions; ``reward`` is a turn's, and with
    ``agent`` one of that agent; ``query``: the query's id, or a part of its text; ``answer``: a part of a turn's text,
    with ``agent`` of one of that agent (all that the other filters leave is unpacked for it); ``evaluation``: only
    those of evaluations, or only those of training; ``failed``: only those that failed, or did not. Without filters,
    all.
    """

    def __init__(self, run: Path | str, answer_s: float = math.inf) -> None:
        """``answer_s``: the longest time of a search in answers, behind which InvalidCondition is raised."""
        directory = RunDirectory.recorded(Path(run))
        self.path = directory.samples
        if not self.path.exists():
            raise SamplesUnreadable(self.path, _reason_of_none(directory))
        with self._readable():
            self._answers = _Answers(answer_s)
            self._database = _open(self.path, self._answers)
        self._newest_record = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; no method may be called afterwards. The end of a ``with`` block does it."""
        self._database.close()

    def recorded(self) -> Recorded:
        """The numbers of all that the file has now, without filters. A run under way adds to them."""
        with self._snapshot():
            execute = self._database.execute
            (trajectories,) = execute(f"SELECT count(*) FROM {_JOINED}").fetchone()
            (samples,) = execute(
                "SELECT count(*) FROM samples s JOIN records r ON r.id = s.record"
            ).fetchone()
            first, last = execute("SELECT min(step), max(step) FROM records WHERE evaluation = 0").fetchone()
            evaluations = execute(
                "SELECT DISTINCT step FROM records WHERE evaluation = 1 ORDER BY step"
            ).fetchall()
            dropped = execute("SELECT value FROM counts WHERE name = 'dropped'").fetchone()
        return Recorded(
            trajectories,
            samples,
            first,
            last,
            tuple(step for (step,) in evaluations),
            dropped[0] if dropped else 0,
        )

    def trajectories(
        self,
        *,
        order: Order = "oldest",
        limit: int | None = None,
        skip: int = 0,
        **filters: Any,
    ) -> list[RecordedTrajectory]:
        """Whole trajectories. ``best`` and ``worst``: by the mean reward of their agents, or of ``agent``; those that
        failed are left out."""
        return [*self.iterate(order=order, limit=limit, skip=skip, **filters)]

    def iterate(
        self, *, order: Order = "oldest", limit: int | None = None, skip: int = 0, **filters: Any
    ) -> Generator[RecordedTrajectory, None, None]:
        """As ``trajectories``, one after the other, all as of the moment of the first: for files that are larger than
        the memory. No other method may be called before its end, or its ``close``."""
        with self._snapshot():
            columns = "r.id, r.step, r.evaluation, r.query, r.text, t.place"
            yield from self._whole(self._select(columns, order, limit, skip, filters))

    def listed(
        self, *, order: Order = "newest", limit: int | None = None, skip: int = 0, **filters: Any
    ) -> list[TrajectoryListed]:
        """As ``trajectories``, without texts and tokens."""
        turns = f"FROM samples s WHERE {_OF_TRAJECTORY}"
        columns = (
            "r.step, r.evaluation, r.query, t.number, t.reward, t.failure, "
            f"(SELECT count(*) {turns}), (SELECT coalesce(sum(s.tokens), 0) {turns})"
        )
        with self._snapshot():
            rows = self._select(columns, order, limit, skip, filters)
        return [TrajectoryListed(step, bool(evaluation), *rest) for step, evaluation, *rest in rows]

    def trajectory(self, step: int, evaluation: bool, query: str, number: int) -> RecordedTrajectory | None:
        """One by its step, the id of its query and its number among those of the query; None if it is missing."""
        select = (
            "SELECT r.id, r.step, r.evaluation, r.query, r.text, t.place "
            f"FROM {_JOINED} WHERE r.step = ? AND r.evaluation = ? AND r.query = ? AND t.number = ?"
        )
        with self._snapshot():
            rows = self._database.execute(select, (step, evaluation, query, number)).fetchall()
            return next(self._whole(rows), None)

    def agents(self) -> list[str]:
        """All agents with turns, by name."""
        with self._snapshot():
            names = self._database.execute("SELECT DISTINCT agent FROM samples ORDER BY agent").fetchall()
        return [name for (name,) in names]

    def count(self, **filters: Any) -> int:
        """The number of trajectories that the filters leave."""
        where, values = _where(**filters)
        with self._snapshot():
            (trajectories,) = self._database.execute(
                f"SELECT count(*) FROM {_JOINED} WHERE {where}", values
            ).fetchone()
        return int(trajectories)

    def rows(self, *, limit: int | None = None, **filters: Any) -> list[SampleListed]:
        """The turns of trajectories without their texts, the oldest first; with ``agent`` or ``reward``, only the turns
        that they fit. ``limit``: keeps the newest."""
        where, values = _where(**filters)
        of_turn, turn_values = _where_sample(filters.get("agent"), filters.get("reward"))
        query = (
            "SELECT r.step, r.evaluation, r.query, t.number, s.turn, s.agent, s.reward, s.advantage, s.version, "
            f"s.tokens, s.finish_reason, t.failure FROM {_JOINED} JOIN samples s ON {_OF_TRAJECTORY} "
            f"WHERE {where} AND {of_turn} ORDER BY {_NEW_FIRST}, s.turn DESC LIMIT ?"
        )
        with self._snapshot():
            turns = self._database.execute(query, (*values, *turn_values, -1 if limit is None else limit))
            newest = [SampleListed(step, bool(evaluation), *rest) for step, evaluation, *rest in turns]
        return newest[::-1]

    # ------------------------------------------------------------------ inside

    def _select(
        self, columns: str, order: Order, limit: int | None, skip: int, filters: dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        where, values = _where(**filters)
        by_reward = _reward_of(filters.get("agent"))
        if order in ("best", "worst"):
            where += f" AND {by_reward[0]} IS NOT NULL"
            values += by_reward[1]
        ordering = {
            "oldest": _OLD_FIRST,
            "newest": _NEW_FIRST,
            "best": f"{by_reward[0]} DESC, {_OLD_FIRST}",
            "worst": f"{by_reward[0]}, {_OLD_FIRST}",
        }[order]
        if order in ("best", "worst"):
            values += by_reward[1]
        query = f"SELECT {columns} FROM {_JOINED} WHERE {where} ORDER BY {ordering} LIMIT ? OFFSET ?"
        return self._database.execute(query, (*values, -1 if limit is None else limit, skip)).fetchall()

    def _whole(self, trajectory_rows: Sequence[tuple[Any, ...]]) -> Iterator[RecordedTrajectory]:
        opened = -1
        for record, step, evaluation, query, text, place in trajectory_rows:
            if opened != record:
                rows, content = self._database.execute(
                    "SELECT rows, content FROM records WHERE id = ?", (record,)
                ).fetchone()
                opened, trajectories, turns = record, rows_of(rows), turns_of(content)
                compared = {} if evaluation else self._read_compared(step, query)
            row = trajectories[place]
            yield RecordedTrajectory(
                step, bool(evaluation), Query(query, text),
                row.number, row.rewards, row.metrics, row.failure,
                tuple(_with_trainer(turn, compared.get((row.number, turn.number))) for turn in turns[place]),
                tuple(map(RecordedProgram._make, row.programs)),
                row.metadata,
            )  # fmt: skip

    def _read_compared(self, step: int, query: str) -> dict[tuple[int, int], Compared]:
        """The trainer's log-probabilities of a group, by trajectory and turn."""
        select = "SELECT content FROM compared WHERE step = ? AND query = ? ORDER BY id"
        parts = self._database.execute(select, (step, query)).fetchall()
        return {place: sample for (content,) in parts for place, sample in compared_of(content).items()}

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Shows the file as of one moment, with tables of all trajectories and samples. Errors: as
        those of ``_readable``."""
        with self._readable():
            self._database.execute("BEGIN")
            self._answers.begin()
            try:
                self._make_rows()
                yield
            finally:
                if self._database.in_transaction:  # some errors have ended it
                    self._database.execute("COMMIT")

    def _make_rows(self) -> None:
        """Adds the rows of new records. Those of removed ones stay, and belong to none: no id is used twice."""
        newest = self._newest_record
        trajectories: list[tuple[Any, ...]] = []
        samples: list[tuple[Any, ...]] = []
        for record, rows in self._database.execute("SELECT id, rows FROM records WHERE id > ?", (newest,)):
            newest = max(newest, record)
            for place, row in enumerate(rows_of(rows)):
                trajectories.append((record, place, row.number, row.reward, storable(row.failure)))
                samples += [(record, place, *sample) for sample in row.samples]
        self._database.executemany("INSERT OR REPLACE INTO trajectories VALUES (?, ?, ?, ?, ?)", trajectories)
        self._database.executemany(
            "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", samples
        )
        self._newest_record = newest

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turns errors of a damaged file into SamplesUnreadable, and that of a search that takes too long into
        InvalidCondition."""
        try:
            yield
        except (sqlite3.Error, ValueError, IndexError) as error:
            if self._answers.is_late:
                raise InvalidCondition(
                    f"the search in answers took more than {self._answers.limit_s:g} s: give a step, an agent or a "
                    "query too"
                ) from None
            raise SamplesUnreadable(self.path, f"can't be read: {error}") from error


def _open(path: Path, answers: "_Answers") -> sqlite3.Connection:
    """Raises sqlite3.Error."""
    try:
        return _connect(path, "mode=ro", answers)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & _PRIMARY_CODE not in _UNWRITABLE:
            raise  # without locks, a file that is being written would be read in the middle of a change
        # WAL needs a file beside this one, and the folder can't be written.
        return _connect(path, "immutable=1", answers)


def _connect(path: Path, option: str, answers: "_Answers") -> sqlite3.Connection:
    name = f"file:{quote(str(path))}?{option}"
    database = sqlite3.connect(name, uri=True, timeout=10.0, isolation_level=None, check_same_thread=False)
    try:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version != FORMAT:
            raise sqlite3.DatabaseError(f"it is of format {version}, and this program reads format {FORMAT}")
        database.executescript(_TABLES)
        database.create_function("holds_answer", 5, answers.hold)
    except BaseException:
        database.close()
        raise
    return database


def _reason_of_none(directory: RunDirectory) -> str:
    section = read_yaml(directory.config).get("samples")
    if isinstance(section, dict) and section.get("steps") == 0:
        return "the run records no trajectories: samples.steps=0 in its config"
    return "no trajectory is recorded yet: has the run begun?"


def _where(
    step: Number | None = None,
    agent: str | None = None,
    reward: Number | None = None,
    query: str | None = None,
    evaluation: bool | None = None,
    failed: bool | None = None,
    answer: str | None = None,
) -> tuple[str, list[Any]]:
    """Raises InvalidCondition."""
    parts: list[str] = ["1"]
    values: list[Any] = []
    if step is not None:
        condition = Condition.of(step)
        parts.append(f"r.step {condition.sql}")
        values += condition.values
    if query is not None:
        parts.append("(r.query = ? OR instr(r.text, ?))")
        values += [query, query]
    if evaluation is not None:
        parts.append("r.evaluation = ?")
        values.append(evaluation)
    if failed is not None:
        parts.append(f"t.failure {'!=' if failed else '='} ''")
    if agent is not None or reward is not None:
        of_turn, turn_values = _where_sample(agent, reward)
        parts.append(f"EXISTS (SELECT 1 FROM samples s WHERE {_OF_TRAJECTORY} AND {of_turn})")
        values += turn_values
    where = " AND ".join(parts)
    if answer is not None:
        # Not one more term of AND: SQLite would unpack all records before it looks at the samples of one.
        where = f"CASE WHEN {where} THEN holds_answer(r.id, r.content, t.place, ?, ?) ELSE 0 END"
        values += [agent, answer]
    return where, values


class _Answers:
    """The SQL function ``holds_answer``. It keeps the answers of the record that it was called with last. ``is_late``:
    it was called later than ``limit_s`` after ``begin``, and has ended the search."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.is_late = False
        self._begin_s = 0.0
        self._record = -1
        self._turns: list[tuple[RecordedTurn, ...]] = []

    def begin(self) -> None:
        """A search begins."""
        self._begin_s, self.is_late = time.monotonic(), False

    def hold(self, record: int, content: bytes, place: int, agent: str | None, text: str) -> bool:
        """True if a turn of the trajectory at ``place``, of ``agent`` if that is given, has ``text`` in its answer."""
        if time.monotonic() > self._begin_s + self.limit_s:
            self.is_late = True
            raise TimeoutError
        if record != self._record:
            self._turns, self._record = turns_of(content), record
        return any(text in turn.text for turn in self._turns[place] if agent in (None, turn.agent))


def _with_trainer(turn: RecordedTurn, compared: Compared | None) -> RecordedTurn:
    if compared is None or len(compared.differences) != len(turn.logprobs):
        return turn
    pairs = zip(turn.logprobs, compared.differences.tolist(), strict=True)
    return turn._replace(
        trainer_logprobs=tuple(logprob + difference for logprob, difference in pairs),
        trainer_version=compared.version,
    )


def _where_sample(agent: str | None, reward: Number | None) -> tuple[str, list[Any]]:
    parts: list[str] = ["1"]
    values: list[Any] = []
    if agent is not None:
        parts.append("s.agent = ?")
        values.append(agent)
    if reward is not None:
        condition = Condition.of(reward)
        parts.append(f"s.reward {condition.sql}")
        values += condition.values
    return " AND ".join(parts), values


def _reward_of(agent: str | None) -> tuple[str, list[Any]]:
    """A trajectory's reward as SQL, and its values."""
    if agent is None:
        return "t.reward", []
    return f"(SELECT avg(s.reward) FROM samples s WHERE {_OF_TRAJECTORY} AND s.agent = ?)", [agent]
