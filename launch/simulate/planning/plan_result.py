"""The result of a plan for people and programs: the fastest, its distance to others, its limit, and a table. Pure."""

import json
from typing import Any, Final

from ..summary import Summary
from .candidates import Candidate
from .planner import PlanOutcome

_ROWS: Final = 10
_FULL: Final = 0.6
"""A share of busy devices from which more of them are the remedy: the rest waits for stragglers in any run."""


def limit_of(summary: Summary) -> str:
    """The part that makes a step as long as it is, and the resource behind it."""
    parts = {
        "rollouts": summary.rollout_alone_s, "both": summary.overlap_s, "training": summary.after_rollout_s
    }  # fmt: skip
    match max(parts, key=parts.__getitem__):
        case "rollouts" if summary.instances_busy >= _FULL:
            return f"the instances, {summary.instances_busy:.0%} busy: more devices for them"
        case "rollouts":
            return (
                f"the slowest trajectories: instances are {summary.instances_busy:.0%} busy, so that more of them "
                "change little; wider instances (tensor_parallel) may"
            )
        case "both" if summary.training_busy >= summary.instances_busy:
            return f"training beside rollouts: the slots are {summary.training_busy:.0%} busy"
        case "both":
            return f"rollouts beside training: the instances are {summary.instances_busy:.0%} busy"
        case _:
            return (
                f"training and new weights after the rollouts: slots are {summary.training_busy:.0%} busy, "
                f"{summary.swapping_s:.1f} s of swaps"
            )


def plan_text(outcome: PlanOutcome) -> str:
    """Lines for people. There is at least one simulated candidate."""
    ranking = outcome.search.ranking()
    (best, best_s), summary = ranking[0], outcome.summaries[ranking[0][0]]
    lines = [f"{best_s:.1f} s a step, {summary.tokens_per_s:.0f} tokens/s: {best.text()}"]
    if isinstance(outcome.as_it_is, Summary):
        lines.append(f"  the scenario as it is  {_times(outcome.as_it_is.step_s, best_s)}")
    elif outcome.as_it_is:
        lines.append(f"  the scenario as it is does not fit: {outcome.as_it_is.splitlines()[-1].strip()}")
    if len(ranking) > 1:
        lines.append(f"  the second             {_times(ranking[1][1], best_s)}")
    lines.append(f"  limited by {limit_of(summary)}")
    if summary.slot_states:
        lines.append(f"  {summary.slot_states}")
    lines += [f"  {_proof(outcome)}", "", *_table(outcome)]
    if outcome.refusals:
        lines += ["", "Left out:", *(f"  {reason}" for reason in outcome.refusals[:_ROWS])]
        if (more := len(outcome.refusals) - _ROWS) > 0:
            lines.append(f"  and {more} more")
    return "\n".join(lines)


def plan_json(outcome: PlanOutcome, written: str) -> str:
    """One JSON object. ``written``: the file with the fastest scenario; empty if nothing fits."""
    ranking = outcome.search.ranking()
    best = outcome.summaries[ranking[0][0]]
    as_it_is = outcome.as_it_is
    return json.dumps({
        "step_s": best.step_s, "limit": limit_of(best), "slot_states": best.slot_states, "scenario": written,
        "is_proved": is_proved(outcome),
        "candidates": len(outcome.bounds),
        "as_it_is": {"step_s": as_it_is.step_s} if isinstance(as_it_is, Summary) else {"refusal": as_it_is},
        "simulated": [_row(candidate, outcome) for candidate, _ in ranking], "refusals": outcome.refusals,
    })  # fmt: skip


def is_proved(outcome: PlanOutcome) -> bool:
    """True if the bounds of all that were not simulated are above the fastest."""
    return not outcome.search.remaining


def _proof(outcome: PlanOutcome) -> str:
    tried, untried = len(outcome.search.seconds), len(outcome.search.remaining)
    words = f"{tried} of {len(outcome.bounds)} candidates simulated; "
    if not untried:
        return words + "the bounds of all others are well above it"
    return words + f"{untried} others have a lower bound" + (" (stopped)" if outcome.stopped else "")


def _times(seconds: float, best_s: float) -> str:
    return f"{seconds:8.1f} s, {seconds / best_s:.2f} times as long"


def _row(candidate: Candidate, outcome: PlanOutcome) -> dict[str, Any]:
    summary = outcome.summaries[candidate]
    return {
        "step_s": summary.step_s, "bound_s": outcome.bounds[candidate].step_s, "tokens_per_s": summary.tokens_per_s,
        "devices": candidate.devices, "instances": dict(candidate.instances),
        "tensor_parallel": dict(candidate.tensor_parallel), "slots": candidate.slots, "ranks": dict(candidate.ranks),
        "micro_batch": candidate.micro_batch, "balance": candidate.balance,
        "instances_busy": summary.instances_busy, "training_busy": summary.training_busy,
    }  # fmt: skip


def _table(outcome: PlanOutcome) -> list[str]:
    lines = [f"{'s a step':>9} {'bound':>7} {'busy':>5} {'train':>5}  numbers"]
    for candidate, seconds in outcome.search.ranking()[:_ROWS]:
        summary, bound = outcome.summaries[candidate], outcome.bounds[candidate].step_s
        shares = f"{summary.instances_busy:5.0%} {summary.training_busy:5.0%}"
        lines.append(f"{seconds:9.1f} {bound:7.1f} {shares}  {candidate.text()}")
    return lines
