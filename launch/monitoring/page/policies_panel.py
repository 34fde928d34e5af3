"""The panel *Policies and pool*: versions, the policies on each slot of a shared pool with the reasons of their
changes, instances and their moves."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ....actors.run_events import (
    InstanceChanged,
    InstanceMoved,
    PolicyResumed,
    PolicySuspended,
    SlotLost,
    WeightsPathChosen,
    WeightsReloaded,
)
from ...run_folder.logged_event import LoggedEvent
from ..console.event_text import note_of, warning_of
from .curves import Query
from .recorded_run import RecordedRun

_PARTS: Final = ("computing", "idle", "swapping", "waiting", "suspended")
_MOST_STAYS: Final = 4000
_MOST_MOVES: Final = 300


def view(run: RecordedRun, query: Query) -> dict[str, Any]:
    """``query`` has no parameters."""
    policies = run.curves.names("version")
    agents = agents_of_policies(run)
    return {
        "policies": [_policy(run, policy, agents.get(policy, [])) for policy in policies],
        "parts": list(_PARTS),
        "stays": _stays(run),
        "reasons": _reasons(run.copies),
        "losses": [
            _move(logged, logged.event.reason) for logged in run.events if isinstance(logged.event, SlotLost)
        ][-_MOST_MOVES:],
        "instances": _instances(run),
        "moves": _moves(run),
        "paths": _paths(run),
    }


def agents_of_policies(run: RecordedRun) -> Mapping[str, Sequence[str]]:
    """The agents of each policy, as the run's config names them."""
    agents: dict[str, list[str]] = defaultdict(list)
    for key, value in run.config.items():
        section, _, rest = key.partition(".")
        if section == "agents" and rest.endswith(".policy"):
            agents[str(value)].append(rest.removesuffix(".policy"))
    return agents


def _policy(run: RecordedRun, policy: str, agents: Sequence[str]) -> dict[str, Any]:
    seconds = {part: sum(run.curves[f"pool_{part}_s/{policy}"].values) for part in _PARTS}
    return {
        "name": policy,
        "agents": list(agents) or [policy],
        "version": int(run.curves[f"version/{policy}"].values[-1]),
        "samples": sum(run.curves[f"samples/{policy}"].values),
        "seconds": seconds if f"pool_computing_s/{policy}" in run.curves else None,
        "suspensions": sum(run.curves[f"suspensions/{policy}"].values),
        "moved_mib": sum(run.curves[f"swapped_mib/{policy}"].values),
    }


def _stays(run: RecordedRun) -> dict[str, Any]:
    """The times of policies on slots: ``[slot, policy, begin_s, end_s, reason]``, where the first two are places in
    ``slots`` and ``policies``; a stay that has not ended yet has None."""
    slots: dict[str, int] = {}
    policies: dict[str, int] = {}
    stays: list[list[Any]] = []
    opened: dict[tuple[str, str], list[Any]] = {}
    ends: dict[str, float | None] = {}
    begun_s = next((life.time for life in run.lives), None)
    for logged in run.copies:
        event = logged.event
        if not isinstance(event, PolicySuspended | PolicyResumed):
            continue
        for slot in filter(None, (name.strip() for name in event.slots.split(","))):
            place = slots.setdefault(slot, len(slots)), policies.setdefault(event.policy, len(policies))
            stay = opened.pop((slot, event.policy), None)
            if isinstance(event, PolicyResumed):
                stay = opened[slot, event.policy] = [*place, logged.time, None, event.reason]
                stays.append(stay)
            elif stay is not None:
                stay[3], stay[4] = logged.time, f"{stay[4]}. Left: {event.reason}"
            else:  # it was there from the beginning
                begin_s = ends.get(slot, begun_s)
                stays.append([*place, begin_s, logged.time, f"Left: {event.reason}"])
            ends[slot] = logged.time
    hidden = max(0, len(stays) - _MOST_STAYS)
    return {"slots": list(slots), "policies": list(policies), "stays": stays[hidden:], "hidden": hidden}


def _reasons(copies: Iterable[LoggedEvent]) -> list[dict[str, Any]]:
    """Suspensions and resumptions by policy and path of the transport."""
    groups: dict[tuple[str, str, str], list[tuple[int, float, str]]] = defaultdict(list)
    for logged in copies:
        if isinstance(event := logged.event, PolicySuspended | PolicyResumed):
            kind = "suspended" if isinstance(event, PolicySuspended) else "resumed"
            groups[event.policy, kind, event.path].append((event.size_bytes, event.seconds, event.reason))
    return [
        {
            "policy": policy, "kind": kind, "path": path, "times": len(group),
            "mean_bytes": sum(size for size, _, _ in group) / len(group),
            "mean_s": sum(seconds for _, seconds, _ in group) / len(group),
            "reason": Counter(reason for _, _, reason in group).most_common(1)[0][0],
        }
        for (policy, kind, path), group in groups.items()
    ]  # fmt: skip


def _instances(run: RecordedRun) -> list[dict[str, Any]]:
    """The newest state of each, with the time and the reason."""
    rows: dict[str, dict[str, Any]] = {}
    for logged in run.events:
        match logged.event:
            case InstanceChanged(instance=name, policy=policy, state=state, reason=reason):
                rows[name] = {
                    "name": name,
                    "policy": policy,
                    "state": state,
                    "reason": reason,
                    "time": logged.time,
                }
            case InstanceMoved(instance=name, to=policy, reason=reason):
                rows[name] = {
                    "name": name,
                    "policy": policy,
                    "state": "moving",
                    "reason": reason,
                    "time": logged.time,
                }
    for name, row in rows.items():
        turns = run.curves[f"actor.turns.{name}/router"].values
        row["turns"] = turns[-1] if turns else None
    return list(rows.values())


def _moves(run: RecordedRun) -> list[dict[str, Any]]:
    kinds = (InstanceChanged, InstanceMoved, WeightsReloaded)
    events = [logged for logged in run.events if isinstance(logged.event, kinds)][-_MOST_MOVES:]
    return [
        _move(logged, text)
        for logged in reversed(events)
        if logged.event is not None and (text := warning_of(logged.event) or note_of(logged.event, 1))
    ]


def _move(logged: LoggedEvent, text: str) -> dict[str, Any]:
    return {"time": logged.time, "text": text}


def _paths(run: RecordedRun) -> list[dict[str, Any]]:
    """The paths that weights took to the instances, with the reasons."""
    ways: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for logged in run.events:
        if isinstance(event := logged.event, WeightsPathChosen):
            refused = "; ".join(f"{path}: {reason}" for path, reason in event.refused.items())
            names = ways[event.policy, event.path, event.reason, refused]
            if event.instance not in names:
                names.append(event.instance)
    return [
        {"policy": policy, "path": path, "reason": reason, "refused": refused, "instances": names}
        for (policy, path, reason, refused), names in ways.items()
    ]
