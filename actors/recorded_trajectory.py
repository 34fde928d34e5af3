"""A trajectory as it is recorded for people, and its form on the way from a rollout worker into the run's file.

A record has one or several trajectories of one query. Its rows are small, and are what people filter by; ``content``
has the texts and tokens, and stays closed until a trajectory is read. On its way and in the file both are bytes: only
a reader takes them apart, because most records of a run are never read.

Everything here is a named tuple: a step has hundreds, they are packed as they are, and making one takes half a us.
"""

import zlib
from array import array
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final, Literal, NamedTuple

import msgpack
import numpy as np

from .messages import Query
from .sample_id import TrajectoryName

PromptPart = str | int | dict[str, Any]
"""A text, the number of an earlier turn of the trajectory, or a message."""

# The fastest level: a third of the next one's time, and texts shrink nearly as far.
_LEVEL: Final = 1
# A shorter content stays as it is: it would become little smaller, in 40 us.
_SHORT: Final = 4096
_ZLIB: Final = b"x"
"""The first byte of compressed content. One of a list in MessagePack is another."""
_NOTHING: Final[Mapping[str, Any]] = {}


class RecordedTurn(NamedTuple):
    """One turn. ``number``: its place among the trajectory's turns, those of all agents. ``prompt``: the parts that the
    workflow wrote; ``prompt_tokens``: their number of tokens, with those of earlier turns.

    ``reward``: the one that its group compares, after the overlong punishment; None if the trajectory failed.
    ``advantage``: the group-local one; None if there is none: in evaluations, for trajectories that don't count, and
    under algorithms whose trainer computes it later. ``version``: of the policy, at the first token;
    ``version_changes``: as in ``Sample``. ``logprobs[i]`` is of ``tokens[i]``. ``columns``: those that the workflow
    wrote. ``left_out``: it is not trained, by the workflow or the rules of its gateway.

    ``trainer_logprobs[i]`` is of ``tokens[i]`` under the trainer's policy ``trainer_version``, before its step: the
    engine's version, unless the sample was trained late. Empty and None if the trainer has not computed them: in
    evaluations, of samples without an advantage, before their micro-batch, and outside of the share
    ``samples.trainer_logprobs``. A record of a worker has none: readers join them.
    """

    number: int
    agent: str
    prompt: tuple[PromptPart, ...]
    text: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish_reason: Literal["stop", "length"]
    reward: float | None = None
    advantage: float | None = None
    temperature: float = 1.0
    version_changes: tuple[int, ...] = ()
    columns: Mapping[str, Any] = _NOTHING
    left_out: bool = False
    trainer_logprobs: tuple[float, ...] = ()
    trainer_version: int | None = None


_LOGPROBS: Final = RecordedTurn._fields.index("logprobs")


class RecordedProgram(NamedTuple):
    """A program that played a part of the trajectory. ``status``: of its exit; minus a signal's number if one has
    killed it. ``problem``: the limit for which it was killed; empty if there is none. ``output``: its last lines."""

    command: str
    status: int
    seconds: float
    problem: str
    output: str


class RecordedTrajectory(NamedTuple):
    """One run of the workflow on a query. ``step``: of training, or the one that the evaluation came after.
    ``rewards`` and ``metrics``: the workflow's, by agent and by name; both empty if it failed. ``failure``: the error,
    or empty. ``turns``: those that had ended, in the order of their numbers. ``programs``: in the order of their
    ends. ``metadata``: of the service that has opened it as a session."""

    step: int
    evaluation: bool
    query: Query
    number: int
    rewards: Mapping[str, float] = _NOTHING
    metrics: Mapping[str, float] = _NOTHING
    failure: str = ""
    turns: tuple[RecordedTurn, ...] = ()
    programs: tuple[RecordedProgram, ...] = ()
    metadata: Mapping[str, Any] = _NOTHING

    @property
    def name(self) -> str:
        """As in logs and in the store: ``{step}:{query}_{trajectory}``, with ``eval`` in place of an evaluation's
        step."""
        return str(TrajectoryName(None if self.evaluation else self.step, self.query.id, self.number))

    @property
    def reward(self) -> float | None:
        """The mean over its agents' rewards, or, if only single turns have rewards, over these; None without any, and
        for one that failed."""
        if self.failure:
            return None
        rewards = list(self.rewards.values()) or [
            turn.reward for turn in self.turns if turn.reward is not None
        ]
        return fmean(rewards) if rewards else None


class SampleRow(NamedTuple):
    """A turn without its text. ``tokens``: generated."""

    number: int
    agent: str
    reward: float | None
    advantage: float | None
    version: int
    tokens: int
    finish_reason: str


class TrajectoryRow(NamedTuple):
    """``reward``: as ``RecordedTrajectory.reward``. ``samples``: the cells of a ``SampleRow`` for each turn.
    ``programs``: those of a ``RecordedProgram``. ``metadata``: as of ``RecordedTrajectory``."""

    number: int
    reward: float | None
    rewards: Mapping[str, float]
    metrics: Mapping[str, float]
    failure: str
    samples: Sequence[Sequence[Any]]
    programs: Sequence[Sequence[Any]] = ()
    metadata: Mapping[str, Any] = _NOTHING


class Record(NamedTuple):
    """Trajectories of one query: all of its group that had ended when it closed, or one of an evaluation. ``number``:
    of the first. ``trajectories``: how many. ``rows``: for ``rows_of``. ``content``: for ``turns_of``."""

    step: int
    evaluation: bool
    query: str
    text: str
    number: int
    trajectories: int
    rows: bytes
    content: bytes

    @property
    def size(self) -> int:
        """Bytes, nearly."""
        return len(self.rows) + len(self.content)


def pack_record(trajectories: Sequence[RecordedTrajectory]) -> Record:
    """A record of at least one trajectory, all of one query and step. Not compressed yet."""
    first = trajectories[0]
    rows = _packb([*map(_row, trajectories)])
    content = _packb([[*map(_turn_cells, trajectory.turns)] for trajectory in trajectories])
    query = first.query
    return Record(
        first.step, first.evaluation, query.id, query.text, first.number, len(trajectories), rows, content
    )


def compress_record(record: Record) -> bytes:
    """A record of ``pack_record`` in its final form. Takes about 10 ms for a MiB."""
    if len(record.content) >= _SHORT:
        record = record._replace(content=zlib.compress(record.content, _LEVEL))
    return _packb(record)


def unpack_record(record: bytes) -> Record:
    """A record of ``compress_record``. Raises ValueError for anything else."""
    try:
        return Record(*_unpackb(record))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"not a record of trajectories: {error}") from error


def rows_of(rows: bytes) -> list[TrajectoryRow]:
    """A row for each trajectory of a record. Raises ValueError for damaged ``rows``."""
    try:
        return [TrajectoryRow(*row) for row in _unpackb(rows)]
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"its rows are damaged: {error}") from error


def turns_of(content: bytes) -> list[tuple[RecordedTurn, ...]]:
    """The turns of each trajectory of a record. Raises ValueError for a damaged ``content``."""
    try:
        trajectories = _unpackb(zlib.decompress(content) if content[:1] == _ZLIB else content)
        return [tuple(map(_turn_of, turns)) for turns in trajectories]
    except (ValueError, TypeError, zlib.error, msgpack.UnpackException) as error:
        raise ValueError(f"its content is damaged: {error}") from error


def _packb(what: Any) -> bytes:
    data: bytes = msgpack.packb(what, default=_plain, unicode_errors="surrogatepass")
    return data


def _unpackb(packed_: bytes) -> Any:
    return msgpack.unpackb(packed_, strict_map_key=False, unicode_errors="surrogatepass")


def _plain(value: Any) -> Any:
    """A value of a column or message that MessagePack lacks."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _row(trajectory: RecordedTrajectory) -> TrajectoryRow:
    samples = [
        (turn.number, turn.agent, turn.reward, turn.advantage, turn.version, len(turn.tokens), turn.finish_reason)
        for turn in trajectory.turns
    ]  # fmt: skip
    return TrajectoryRow(
        trajectory.number,
        trajectory.reward,
        trajectory.rewards,
        trajectory.metrics,
        trajectory.failure,
        samples,
        trajectory.programs,
        trajectory.metadata,
    )


def _turn_cells(turn: RecordedTurn) -> list[Any]:
    cells: list[Any] = [*turn]
    cells[_LOGPROBS] = array("f", turn.logprobs).tobytes()  # half the size of MessagePack's floats
    return cells


def _turn_of(cells: list[Any]) -> RecordedTurn:
    cells[_LOGPROBS] = array("f", cells[_LOGPROBS])
    plain: list[Any] = [tuple(cell) if isinstance(cell, list | array) else cell for cell in cells]
    return RecordedTurn(*plain)
