"""The panel *Trajectories*: the recorded ones by filters, and one of them as a conversation with its tokens."""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

from ....actors.errors import ConfigError
from ....actors.recorded_trajectory import PromptPart, RecordedTrajectory, RecordedTurn
from ....core.errors import FlexmarlError
from ...errors import SamplesUnreadable
from ...run_folder.samples.conversation import (
    branches_of,
    call_text,
    difference_of,
    differences_of,
    title_of,
)
from ...run_folder.samples.reader import Order, Samples, TrajectoryListed
from ...run_folder.samples.showing import explain_empty
from .curves import Query
from .recorded_run import RecordedRun

LISTED: Final = 100
_MOST_ALIKE: Final = 50
_MOST_CHARACTERS: Final = 20_000
_MOST_TOKENS: Final = 4_000
_MOST_TURNS: Final = 200
_MOST_DIGITS: Final = 18
"""Numbers of more digits do not fit into the file's columns."""

_ORDERS: Final[tuple[Order, ...]] = ("newest", "oldest", "best", "worst")
_KINDS: Final[Mapping[str, bool]] = {"evaluation": True, "training": False}


class InvalidName(FlexmarlError):
    """The name of a trajectory, in an address, can be of none."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"of={name[:40]}... can't be a trajectory: its step or number has more than {_MOST_DIGITS} digits"
        )


def view(run: RecordedRun, query: Query) -> dict[str, Any]:
    """``query``: ``like``, the name of a trajectory of another run, for this run's of the same query; ``of``, the name
    of one trajectory, with ``tokens`` for its tokens, or with ``place`` and ``from`` for
    the rest of a long text; else the filters of ``Samples``, ``order`` and ``skip``. Raises SamplesUnreadable,
    InvalidCondition, InvalidName."""
    with run.samples() as samples:
        if "like" in query:
            return {"rows": _alike(samples, query["like"])}
        name = query.get("of")
        if name is None:
            return _listing(samples, query)
        trajectory = _trajectory(samples, name)
    if trajectory is None:
        raise SamplesUnreadable(
            samples.path, f"it has no trajectory {name} any more: only the last steps are kept"
        )
    if "place" in query:
        return {"text": _rest(trajectory, query["place"], _whole(query.get("from")))}
    return conversation(run, trajectory, with_tokens=query.get("tokens") == "1")


def _listing(samples: Samples, query: Query) -> dict[str, Any]:
    filters: dict[str, Any] = {
        name: query[name] for name in ("step", "agent", "reward", "query", "answer") if query.get(name)
    }
    if (kind := query.get("kind", "")) in _KINDS:
        filters["evaluation"] = _KINDS[kind]
    order: Order = next((order for order in _ORDERS if order == query.get("order")), "newest")
    if query.get("failed") == "1":
        filters["failed"] = True
        order = order if order in ("newest", "oldest") else "newest"
    rows = samples.listed(order=order, limit=LISTED, skip=_whole(query.get("skip")), **filters)
    total = samples.count(**filters)
    return {
        "total": total,
        "words": "" if total else explain_empty(samples, filters),
        "agents": samples.agents(),
        "rows": [listed_row(row) for row in rows],
    }


def _alike(samples: Samples, name: str) -> list[dict[str, Any]]:
    """Rows of the same query as the trajectory ``name`` of another run: those of the same kind, of the nearest step and
    of the same number first."""
    place = _place(name)
    if place is None:
        return []
    step, evaluation, query, number = place
    rows = [row for row in samples.listed(query=query) if row.query == query]

    def distance(row: TrajectoryListed) -> tuple[bool, int, bool, int]:
        return row.evaluation != evaluation, abs(row.step - step), row.number != number, row.number

    return [listed_row(row) for row in sorted(rows, key=distance)[:_MOST_ALIKE]]


def listed_row(row: TrajectoryListed) -> dict[str, Any]:
    """A row of the list, with the trajectory's name in addresses."""
    return {**row._asdict(), "name": _name(row.step, row.evaluation, row.query, row.number)}


def conversation(run: RecordedRun, trajectory: RecordedTrajectory, *, with_tokens: bool) -> dict[str, Any]:
    """One trajectory, with long texts cut: ``total`` is their whole length."""
    branches = branches_of(trajectory.turns)
    return {
        "name": _name(trajectory.step, trajectory.evaluation, trajectory.query.id, trajectory.number),
        "title": title_of(trajectory),
        "rewards": trajectory.rewards,
        "metrics": trajectory.metrics,
        "metadata": {name: str(value)[:_MOST_CHARACTERS] for name, value in trajectory.metadata.items()},
        "failure": trajectory.failure[:_MOST_CHARACTERS],
        "turns": [_turn(run, turn, branches, with_tokens) for turn in trajectory.turns[:_MOST_TURNS]],
        "hidden_turns": max(0, len(trajectory.turns) - _MOST_TURNS),
        "programs": [program._asdict() for program in trajectory.programs],
    }


def _turn(run: RecordedRun, turn: RecordedTurn, branches: set[int], with_tokens: bool) -> dict[str, Any]:
    shown = {
        "number": turn.number, "agent": turn.agent, "reward": turn.reward, "advantage": turn.advantage,
        "versions": sorted({turn.version, *turn.version_changes[1::2]}), "changes": list(turn.version_changes),
        "prompt_tokens": turn.prompt_tokens, "count": len(turn.tokens), "is_cut": turn.finish_reason == "length",
        "left_out": turn.left_out, "temperature": turn.temperature,
        "columns": {name: str(value)[:200] for name, value in turn.columns.items()},
        "prompt": [_part(part, turn.number in branches) for part in turn.prompt],
        "text": _cut(turn.text),
        "trainer_version": turn.trainer_version,
        "difference": difference._asdict() if (difference := difference_of(turn)) else None,
    }  # fmt: skip
    if with_tokens and turn.logprobs:
        first = turn._replace(tokens=turn.tokens[:_MOST_TOKENS], logprobs=turn.logprobs[:_MOST_TOKENS])
        shown["tokens"] = _pieces(run, first)
        shown["logprobs"] = [round(logprob, 4) for logprob in first.logprobs]
        # Of a turn that is not compared too: the page says so.
        shown["differences"] = [float(f"{value:.3g}") for value in differences_of(turn)[:_MOST_TOKENS]]
    return shown


def _pieces(run: RecordedRun, turn: RecordedTurn) -> list[str]:
    """The texts of the tokens; their numbers if the config is of another version, which names the tokenizer."""
    try:
        return list(run.token_texts(turn))
    except ConfigError:
        return [f"<{token}>" for token in turn.tokens]


def _part(part: PromptPart, is_branch: bool) -> dict[str, Any]:
    if isinstance(part, int):
        return {"kind": "turn", "turn": part, "is_branch": is_branch}
    if isinstance(part, str):
        return {"kind": "text", **_cut(part)}
    calls = [call_text(call) for call in part.get("tool_calls") or ()]
    role = str(part.get("role", "?"))
    return {"kind": "message", "role": role, "calls": calls, **_cut(_text_of(part))}


def _cut(text: str) -> dict[str, Any]:
    return {"text": text[:_MOST_CHARACTERS], "total": len(text)}


def _rest(trajectory: RecordedTrajectory, place: str, begin: int) -> str:
    """The next part of a text. ``place``: ``TURN`` for the turn's, ``TURN.PART`` for a part of its prompt."""
    number, _, part = place.partition(".")
    turn = next((turn for turn in trajectory.turns if str(turn.number) == number), None)
    if turn is None:
        return ""
    texts = [turn.text]
    if part:
        index = _whole(part)
        texts = [_text_of(piece) for piece in turn.prompt[index : index + 1]]
    return "".join(texts)[begin : begin + _MOST_CHARACTERS]


def _text_of(part: PromptPart) -> str:
    return part if isinstance(part, str) else "" if isinstance(part, int) else str(part.get("content") or "")


def _name(step: int, evaluation: bool, query: str, number: int) -> str:
    """An id may be any text: it is quoted, and so the same in an address."""
    return f"{step}{'e' if evaluation else 't'}{number}.{quote(query, safe='', errors='surrogatepass')}"


def _trajectory(samples: Samples, name: str) -> RecordedTrajectory | None:
    place = _place(name)
    return None if place is None else samples.trajectory(*place)


def _place(name: str) -> tuple[int, bool, str, int] | None:
    """Step, kind, query and number in a name; None for another text. Raises InvalidName."""
    place, _, query = name.partition(".")
    step, kind, number = place.partition("e" if "e" in place else "t")
    if not (kind and step.isdecimal() and number.isdecimal()):
        return None
    if max(len(step), len(number)) > _MOST_DIGITS:
        raise InvalidName(name)
    return int(step), kind == "e", unquote(query, errors="surrogatepass"), int(number)


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 10 else 0
