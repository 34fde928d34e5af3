"""Writes and reads ``metrics.jsonl`` (one object per step) and ``events.jsonl`` (one object per event).

Keys of ``metrics.jsonl`` are the names of figures (``actors/figures.py``), and for the parts of a step ``figure/name``:

    step, time_s, tokens, overlap_s ...        the step
    reward/<agent> ...                         an agent
    loss/<policy>, grad_norm/<policy> ...      a policy
    versions, generated_by                     {policy: version} after the step, and of its turns
    last_query                                 the id of the query whose group has ended the step's rollout
    elo/<pool> ...                             a pool of past versions
    device_used_mib/<device> ...               a GPU, by its UUID
    rss_mib/<process> ...                      an actor process
    actor.<figure>/<actor>                     an actor's own ``statistics()``, such as ``actor.rows_ready/store``
                                               and ``actor.engine_waiting/<instance>``
    workflow/<metric>                          the workflow's own metrics, means over the step's trajectories
    source/<metric>                            figures of the query source
    eval/<metric>                              the evaluation after the step

Figures of processes and actors are at most about a second old. A figure that was not measured is left out; a number
that is not finite is null.

Keys of ``events.jsonl`` are ``time`` (Unix seconds), ``event`` (its name) and the fields of the event
(``run_events.py``); the metrics of an evaluation are on the same level as its fields.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from ...actors.figures import FAMILIES, FIGURES
from ...actors.run_events import Evaluated, RunEvent
from ...actors.step_metrics import SUBJECT_OF, StepMetrics
from ...core.durable.files import replace_private
from ..monitoring.formatting import number

_OF_ACTOR: Final = "actor."
VERSIONS: Final = ("versions", "generated_by")
_QUERY: Final = "last_query"
_FAMILIES: Final = {**{family: family for family in FAMILIES}, "eval": "evaluation"}
_FIELDS: Final = tuple(field.name for field in fields(StepMetrics) if field.name in FIGURES["step"])
_PART_OF: Final = {name: part for part, subject in SUBJECT_OF.items() for name in FIGURES[subject]}
_SHOWN_BYTES: Final = 60
_READ_BYTES: Final = 64 * 1024
_STEP_LIMIT: Final = 10**12  # a float holds every step below it exactly
_EVENT: Final[TypeAdapter[RunEvent]] = TypeAdapter(RunEvent)


# --------------------------------------------------------------------------- steps


def metrics_to_json(metrics: StepMetrics) -> dict[str, Any]:
    """The line of a step in ``metrics.jsonl``: one flat mapping, whose keys are ``figure`` or ``figure/name``. Figures
    that were not measured are left out."""
    line: dict[str, Any] = {name: getattr(metrics, name) for name in _FIELDS} | metrics.figures
    line |= {key: dict(getattr(metrics, key)) for key in VERSIONS} | {_QUERY: metrics.last_query or None}
    for part in SUBJECT_OF:
        for name, numbers in getattr(metrics, part).items():
            line |= {f"{figure}/{name}": value for figure, value in numbers.items()}
    for actor, figures in metrics.by_actor.items():
        line |= {f"{_OF_ACTOR}{figure}/{actor}": value for figure, value in figures.items()}
    for family, field in _FAMILIES.items():
        line |= {f"{family}/{name}": value for name, value in getattr(metrics, field).items()}
    return {key: value for key, value in line.items() if value is not None}


def metrics_from_json(line: Mapping[str, Any]) -> StepMetrics | None:
    """The step that a line holds; None if one of its required fields is missing or is not a number.

    Other values that are missing, unknown or not numbers count as not measured.
    """
    step = line.get("step")
    if type(step) is not int or not 0 <= step < _STEP_LIMIT:
        return None
    of_step: dict[str, Any] = {"figures": {}, "by_actor": {}}
    of_step |= {field: {} for field in (*SUBJECT_OF, *_FAMILIES.values())}
    for key in VERSIONS:
        versions = line.get(key)
        of_step[key] = {
            policy: version
            for policy, version in (versions.items() if isinstance(versions, dict) else ())
            if type(version) is int
        }
    if isinstance(query := line.get(_QUERY), str):
        of_step[_QUERY] = query
    for key, value in line.items():
        if number(value) is None:
            continue
        figure, slash, name = key.partition("/")
        if not slash:
            if figure in _FIELDS:
                of_step[figure] = value
            elif figure in FIGURES["step"]:
                of_step["figures"][figure] = value
        elif figure in _FAMILIES:
            of_step[_FAMILIES[figure]][name] = value
        elif figure.startswith(_OF_ACTOR):
            of_step["by_actor"].setdefault(name, {})[figure.removeprefix(_OF_ACTOR)] = value
        elif figure in _PART_OF:
            of_step[_PART_OF[figure]].setdefault(name, {})[figure] = value
    try:
        return StepMetrics(**of_step)
    except TypeError:  # a required field is missing
        return None


def label_of(field: str) -> str:
    """The kind of the names behind the slash of ``field/name``: ``agent``, ``policy``, ``process``, ``device``,
    ``opponent``, ``metric``; ``name`` for a field that is unknown."""
    if field in _FAMILIES:
        return "metric"
    if field in VERSIONS:
        return "policy"
    return SUBJECT_OF[_PART_OF[field]] if field in _PART_OF else "name"


# --------------------------------------------------------------------------- events


def event_to_json(event: RunEvent, time_s: float | None = None) -> dict[str, Any]:
    """The line of an event that happens at ``time_s``, Unix seconds; None: now."""
    fields_ = asdict(event)
    metrics = fields_.pop("metrics", {})
    line = {"time": round(time.time() if time_s is None else time_s, 3), "event": fields_.pop("event")}
    line |= {name: value for name, value in fields_.items() if value is not None}
    return line | {name: value for name, value in metrics.items() if name not in line}


def event_from_json(line: Mapping[str, Any]) -> RunEvent | None:
    """The event that a line holds; None if the line lacks a field, or has an unknown name."""
    if line.get("event") == "evaluated":
        fixed_keys = {"time", *(field.name for field in fields(Evaluated))}
        metrics = {
            name: value
            for name, value in line.items()
            if name not in fixed_keys and number(value) is not None
        }
        line = {**line, "metrics": metrics}
    try:
        return _EVENT.validate_python(line)
    except ValidationError:
        return None


# --------------------------------------------------------------------------- files


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a file, and the number of lines that hold none. A missing file is empty."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], 0
    lines = [object_of(line) for line in text.splitlines() if line.strip()]
    objects = [line for line in lines if line is not None]
    return objects, len(lines) - len(objects)


def size_of(path: Path) -> int:
    """Bytes; 0 if the file is missing."""
    return path.stat().st_size if path.exists() else 0


def lines_from(path: Path, at: int) -> list[bytes]:
    """The next whole lines from byte ``at`` on, with their line breaks, about 64 KiB; at least one if there is one. A
    missing file is empty."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            return [line for line in file.readlines(_READ_BYTES) if line.endswith(b"\n")]
    except FileNotFoundError:
        return []


def last_lines(path: Path, most: int) -> list[bytes]:
    """The last ``most`` whole lines, without their line breaks; those before them are not read. A
    missing file is empty."""
    try:
        with path.open("rb") as file:
            at, end = file.seek(0, os.SEEK_END), b""
            while at > 0 and end.count(b"\n") <= most:
                size = min(at, _READ_BYTES)
                at = file.seek(at - size)
                end = file.read(size) + end
    except FileNotFoundError:
        return []
    return end.split(b"\n")[:-1][-most:]


@dataclass(frozen=True, slots=True)
class KeptLines:
    """``objects``: of the lines that stay. ``damaged``: number and beginning of lines without an object. ``torn``: the
    beginning of a last line without a line break, which a crash in the middle of a write leaves; None without one."""

    objects: list[dict[str, Any]]
    damaged: list[tuple[int, str]]
    torn: str | None = None


def keep_lines(
    path: Path,
    is_whole: Callable[[dict[str, Any]], bool],
    is_wanted: Callable[[dict[str, Any]], bool],
    key: Callable[[dict[str, Any]], object] | None = None,
) -> KeptLines:
    """Removes the lines that are damaged (no object, or one that is not ``is_whole``) or not ``is_wanted``, and of
    those with an equal ``key`` all but the last. The file changes as a whole or not at all. Raises OSError."""
    if not path.exists():
        return KeptLines([], [])
    content = path.read_bytes()
    *lines, rest = content.split(b"\n")
    kept: dict[object, tuple[bytes, dict[str, Any]]] = {}
    damaged, torn = [], None
    for at, line in enumerate([*lines, rest], 1):
        record = object_of(line)
        if record is not None and is_whole(record):
            if is_wanted(record):
                name = at if key is None else key(record)
                kept.pop(name, None)
                kept[name] = line, record
        elif line.strip():
            shown = line[:_SHOWN_BYTES].decode(errors="replace")
            if at <= len(lines):
                damaged.append((at, shown))
            else:
                torn = shown
    kept_content = b"".join(line + b"\n" for line, _ in kept.values())
    if kept_content != content:
        replace_private(path, kept_content, durable=True)
    return KeptLines([record for _, record in kept.values()], damaged, torn)


def object_of(line: str | bytes) -> dict[str, Any] | None:
    """The object that a line holds; None for any other line, as after a crash in the middle of a write."""
    try:
        try:
            record = from_json(line)  # a third of the time that ``json.loads`` takes
        except ValueError:
            record = json.loads(line)  # takes lone surrogates too, which texts of models may have
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
