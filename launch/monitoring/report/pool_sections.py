"""The section of the report about a shared training pool: what each policy did, and why it was suspended."""

from collections import Counter, defaultdict
from typing import Final

from ....actors.run_events import PolicyResumed, PolicySuspended, SlotLost
from ..formatting import clock, compact
from .page_parts import note, table
from .run_history import History

COPIES: Final = (PolicySuspended, PolicyResumed)
"""Events that this section sums up: there may be many in a step."""

_SHOWN: Final = 50
_PARTS: Final = ("computing", "idle", "swapping", "waiting", "suspended")
_WORDS: Final = (
    "Idle: on its slots without a computation. Swapping: on its way to its slots or from them. Waiting: others had the "
    "slots while a computation was ready. Suspended: without work. Shares of the time of its optimizer steps."
)


def pool(history: History) -> str:
    """Empty for a static pool."""
    policies = [policy for policy in history.policies if history.of_policy(policy, "pool_computing_s")]
    if not policies:
        return ""
    rows = []
    for policy in policies:
        seconds = [sum(value for _, value in history.of_policy(policy, f"pool_{part}_s")) for part in _PARTS]
        whole = sum(seconds) or 1.0
        suspensions = sum(n for _, n in history.of_policy(policy, "suspensions"))
        moved = sum(mib for _, mib in history.of_policy(policy, "swapped_mib"))
        again = sum(n for _, n in history.of_policy(policy, "repeated_micro_batches"))
        row = [policy, *(f"{share / whole:.1%}" for share in seconds), f"{suspensions:g}"]
        rows.append([*row, compact(moved), f"{again:g}"])
    heads = ["policy", *_PARTS, "suspensions", "moved, MiB", "trained again"]
    return f"<h2>Training pool</h2>{table(heads, rows)}{note(_WORDS)}{_copies(history)}{_losses(history)}"


def _copies(history: History) -> str:
    """Suspensions and resumptions by policy and path: bytes, seconds, and the commonest reason."""
    sizes: dict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
    reasons: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for logged in history.events:
        event = logged.event
        if isinstance(event, COPIES):
            kind = "suspended" if isinstance(event, PolicySuspended) else "resumed"
            key = str(event.policy), kind, event.path
            sizes[key].append((event.size_bytes, event.seconds))
            reasons[key][event.reason] += 1
    rows = []
    for key, copies in sizes.items():
        size_bytes, seconds = (sum(column) for column in zip(*copies, strict=True))
        mean_ms = f"{1000 * seconds / len(copies):.3g}"
        mean_mib = compact(size_bytes / len(copies) / 2**20)
        rows.append([*key, f"{len(copies)}", mean_mib, mean_ms, reasons[key].most_common(1)[0][0]])
    heads = ["policy", "", "path", "times", "mean MiB", "mean ms", "a reason"]
    return table(heads, rows, css="words") if rows else ""


def _losses(history: History) -> str:
    rows = [
        [clock(logged.line.get("time")), event.slot, event.policies, f"{event.repeated}", event.reason]
        for logged in history.events
        if isinstance(event := logged.event, SlotLost)
    ]
    if not rows:
        return ""
    hidden = len(rows) - _SHOWN
    more = note(f"{hidden} later ones are in events.jsonl.") if hidden > 0 else ""
    heads = ["time", "slot", "policies", "micro-batches trained again", "reason"]
    words = "slot worker was lost" if len(rows) == 1 else "slot workers were lost"
    return f"<h3>{len(rows)} {words}</h3>{table(heads, rows[:_SHOWN], css='words')}{more}"
