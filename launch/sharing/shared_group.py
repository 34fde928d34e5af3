"""A finished group of a run as text, for runs of other models: made of the records of its trajectories.

    samples.sqlite ─> read_groups ─> SharedGroup ─> lines of a log (``run/logged_lines.py``)

Tokens, log-probabilities and versions stay where they are: a run of another model has other ones. So a prompt that
contains an earlier turn is written out, with that turn's prompt and answer.
"""

import json
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import xxhash

from ...actors.recorded_trajectory import RecordedTurn, TrajectoryRow, rows_of, turns_of
from ...core.base.texts import half_problem
from ..config.run_config import RunConfig

PREFIX: Final = "shared-"
"""Begins the names of the groups of other runs: a run does not pass them on."""
_MOST: Final = 64
_AGAIN: Final = re.compile(r"~\d+")


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a run: runs with the same ``digest`` of ``workflow.py`` may share. ``name``: of the recipe, for
    people."""

    name: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name} (workflow.py {self.digest})"


def task_of(config: RunConfig) -> Task:
    """Raises OSError."""
    folder = Path(config.recipe)
    return Task(folder.name, xxhash.xxh3_64_hexdigest((folder / "workflow.py").read_bytes()))


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """``number``: of its record in its run, rising. ``step``: of that run. ``newest``: that run's step now. ``lines``:
    a trajectory each, as ``ConnectedRun.submit_logged`` takes them, without log-probabilities; none if it is there to
    say that the run shares."""

    number: int
    step: int
    newest: int
    lines: list[dict[str, Any]]

    def name(self, origin: str) -> str:
        """The name of its query in a run to which ``origin`` gave it: the same whenever it comes, so that it is trained
        once."""
        text = json.dumps(self.lines, sort_keys=True)
        return f"{PREFIX}{origin}-{self.number}-{xxhash.xxh3_64_hexdigest(text.encode())[:8]}"


def read_groups(path: Path, after: int | None, agents: Iterable[str]) -> tuple[int, list[SharedGroup]]:
    """The number of the newest record looked at, and the groups among the next records behind ``after``; None: behind
    all that are there. ``path``: ``samples.sqlite``. ``agents``: whose turns are shared, those that are trained. Raises
    sqlite3.Error, ValueError for a file that can't be read."""
    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=10.0)) as database:
        newest, newest_step = database.execute(
            "SELECT coalesce(max(id), 0), coalesce(max(step), 0) FROM records WHERE evaluation = 0"
        ).fetchone()
        if after is None or after > newest:  # the numbers of another run, which had the address before
            return newest, []
        records = database.execute(
            "SELECT id, step, query, rows, content FROM records WHERE evaluation = 0 AND id > ? ORDER BY id LIMIT ?",
            (after, _MOST),
        ).fetchall()
    groups = []
    for number, step, query, rows, content in records:
        after = number
        if not query.startswith(PREFIX) and not _AGAIN.search(query):  # of another run, or comes again
            lines = group_lines(rows_of(rows), turns_of(content), frozenset(agents))
            if lines:
                groups.append(SharedGroup(number, step, newest_step, lines))
    return after, groups


def group_lines(
    rows: Sequence[TrajectoryRow], turns: Sequence[Sequence[RecordedTurn]], agents: frozenset[str]
) -> list[dict[str, Any]]:
    """A line for each trajectory that did not fail; empty if fewer than two are left, whose rewards can be compared."""
    lines = [
        line
        for row, of_row in zip(rows, turns, strict=True)
        if not row.failure and (line := _line(row.rewards, of_row, agents)) is not None
    ]
    return lines if len(lines) > 1 else []


def _line(
    rewards: Mapping[str, float], turns: Sequence[RecordedTurn], agents: frozenset[str]
) -> dict[str, Any] | None:
    """None for a trajectory that a log can't have: an agent's turns have rewards of their own, or are left out."""
    shared = [turn for turn in turns if turn.agent in agents]
    if not shared or any(turn.left_out or turn.agent not in rewards for turn in shared):
        return None
    by_number = {turn.number: turn for turn in turns}
    try:
        listed = [
            {
                "agent": turn.agent,
                "prompt": expand_prompt(turn, by_number),
                "answer": turn.text,
                "temperature": turn.temperature,
                "truncated": turn.finish_reason == "length",
            }
            for turn in shared
        ]
    except KeyError:  # a turn of its prompt is not in the record
        return None
    line = {"turns": listed, "reward": {turn.agent: rewards[turn.agent] for turn in shared}}
    return None if half_problem(line) else line


def expand_prompt(turn: RecordedTurn, by_number: Mapping[int, RecordedTurn]) -> list[Any]:
    """The prompt of ``turn`` as text or messages. An earlier turn in it stands for its own prompt and its answer.
    Raises KeyError for a turn that is missing in ``by_number``."""
    is_chat = _is_chat(turn, by_number)
    parts: list[Any] = []
    for part in turn.prompt:
        if isinstance(part, int):
            earlier = by_number[part]
            parts += expand_prompt(earlier, by_number)
            parts.append({"role": "assistant", "content": earlier.text} if is_chat else earlier.text)
        else:
            parts.append(part)
    return parts


def _is_chat(turn: RecordedTurn, by_number: Mapping[int, RecordedTurn]) -> bool:
    return any(
        isinstance(part, dict) or (isinstance(part, int) and _is_chat(by_number[part], by_number))
        for part in turn.prompt
    )
