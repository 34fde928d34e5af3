"""The section of the report about inference instances: their turns and tokens, and their moves between policies."""

from collections.abc import Mapping
from typing import Final

from ...actors.run_events import InstanceMoved
from ..formatting import clock, compact, count
from .page_parts import note, table
from .run_history import History

_ROUTER: Final = "router"
_MOVES_SHOWN: Final = 50
_WORDS: Final = (
    "Since the start of each instance, up to the last step. Queue: from the first instance that served the "
    "turn's version until one had room. Service: at the instance. Batch: sequences decoded together, the mean."
)


def instances(history: History) -> str:
    rows = _rows(history.steps[-1].by_actor) if history.steps else []
    moves = _moves(history)
    if not rows and not moves:
        return ""
    heads = [
        "instance",
        "turns",
        "queue, mean s",
        "service, mean s",
        "batch",
        "prefill tokens",
        "decode tokens",
    ]
    shown = table(heads, rows) + note(_WORDS) if rows else ""
    return f"<h2>Instances</h2>{shown}{moves}"


def _rows(by_actor: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    router = by_actor.get(_ROUTER, {})
    rows = []
    for figure, turns in router.items():
        kind, dot, instance = figure.partition(".")
        if not dot or kind != "turns":
            continue
        engine = by_actor.get(instance, {})
        sums = [router.get(f"{total}.{instance}", 0.0) for total in ("queue_s", "service_s")]
        row = [instance, f"{turns:g}", *(f"{value / turns:.3g}" if turns else "–" for value in sums)]
        row.append(f"{engine['batch_size']:.1f}" if "batch_size" in engine else "–")
        tokens = (engine.get(f"engine_{kind}_tokens") for kind in ("prompt", "generated"))
        rows.append([*row, *("–" if number is None else compact(number) for number in tokens)])
    return rows


def _moves(history: History) -> str:
    moves = [logged for logged in history.events if isinstance(logged.event, InstanceMoved)]
    if not moves:
        return ""
    rows = []
    for logged in moves[:_MOVES_SHOWN]:
        move = logged.event
        assert isinstance(move, InstanceMoved)
        rows.append([clock(logged.line.get("time")), move.instance, move.policy, move.to, move.reason])
    left = len(moves) - len(rows)
    more = note(f"{left} later ones are in events.jsonl.") if left else ""
    found = table(["time", "instance", "from", "to", "reason"], rows, css="words")
    return f"<h3>{count(len(moves), 'move')} between policies</h3>{found}{more}"
