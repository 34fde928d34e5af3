"""The section of the report about inference instances: their turns and tokens, the new weights that they load, and
their moves between policies."""

from collections.abc import Mapping
from typing import Final

from ....actors.names import PolicyName
from ....actors.run_events import InstanceMoved, WeightsPathChosen
from ..formatting import clock, compact, count
from .page_parts import note, table
from .run_history import History

_ROUTER: Final = "router"
_MOVES_SHOWN: Final = 50
_WORDS: Final = (
    "Since the start of each instance, up to the last step. Queue: from the first instance that served the "
    "turn's version until one had room. Service: at the instance. Batch: sequences decoded together, the mean."
)
_LOADS_WORDS: Final = (
    "Milliseconds at an instance, over all steps. Pause: from the last token of the turns that new weights interrupted "
    "until the instance generates again. Transfer, copying the bytes, and load, the engine's own work, are parts of it."
)
_LOADS: Final = ("pause", "transfer", "load")


def instances(history: History) -> str:
    """The section about instances, as HTML; empty without any figure of them."""
    rows = _rows(history.steps[-1].by_actor) if history.steps else []
    loads, moves = _loads(history) + _paths(history), _moves(history)
    if not (rows or loads or moves):
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
    return f"<h2>Instances</h2>{shown}{loads}{moves}"


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


def _loads(history: History) -> str:
    rows = [row for policy in history.policies if (row := _loads_of(policy, history))]
    if not rows:
        return ""
    heads = [f"{part}, {kind} ms" for part in _LOADS for kind in ("mean", "max")]
    return f"<h3>New weights</h3>{table(['policy', *heads], rows)}{note(_LOADS_WORDS)}"


def _loads_of(policy: PolicyName, history: History) -> list[str]:
    """Empty if the policy got no new weights."""
    row = []
    for part in _LOADS:
        means, maxima = (
            [y for _, y in history.of_policy(policy, f"{part}_{kind}_s")] for kind in ("mean", "max")
        )
        if not means or not maxima:
            return []
        row += [f"{1000 * sum(means) / len(means):.3g}", f"{1000 * max(maxima):.3g}"]
    return [policy, *row]


def _paths(history: History) -> str:
    """The paths that weights took to the instances, with the instances and the reasons."""
    instances: dict[tuple[str, str, str, str], list[str]] = {}
    for event in history.events_of(WeightsPathChosen):
        refused = "; ".join(f"{path}: {reason}" for path, reason in event.refused.items())
        of = instances.setdefault((str(event.policy), event.path, event.reason, refused), [])
        if event.instance not in of:
            of.append(event.instance)
    rows = [[*way[:2], ", ".join(names), *way[2:]] for way, names in instances.items()]
    heads = ["policy", "path", "instances", "reason", "against faster paths"]
    return table(heads, rows, css="words") if rows else ""


def _moves(history: History) -> str:
    moves = [logged for logged in history.events if isinstance(logged.event, InstanceMoved)]
    if not moves:
        return ""
    rows = []
    for logged in moves[:_MOVES_SHOWN]:
        move = logged.event
        assert isinstance(move, InstanceMoved)
        rows.append([clock(logged.line.get("time")), move.instance, move.policy, move.to, move.reason])
    hidden = len(moves) - len(rows)
    more = note(f"{hidden} later ones are in events.jsonl.") if hidden else ""
    shown = table(["time", "instance", "from", "to", "reason"], rows, css="words")
    return f"<h3>{count(len(moves), 'move')} between policies</h3>{shown}{more}"
