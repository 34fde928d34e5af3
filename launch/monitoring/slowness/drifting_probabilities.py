"""Cause: the trainer computes other probabilities of the tokens than the engine that has drawn them."""

import math
from collections.abc import Iterator
from statistics import fmean
from typing import Final

from .evidence import Evidence
from .finding import Finding

_OF_STALE_SAMPLES: Final = 0.1
_NEWEST: Final = 10
"""Steps whose mean is judged."""
_GROWTH: Final = 2.0


def drifting_probabilities(evidence: Evidence) -> Iterator[Finding]:
    """By the mean of ``|trainer's / engine's probability - 1|``. With samples of older versions a difference is due:
    then it is judged by a greater bound."""
    for policy in evidence.names("policy"):
        # It is 0 in a step that has trained no token whose probability the engine knows.
        deviations = [value for value in evidence.values("policy", policy, "ratio_deviation") if value]
        if not deviations:
            continue
        deviation = fmean(deviations[-_NEWEST:])
        samples = evidence.per_step("policy", policy, "samples")
        stale = evidence.per_step("policy", policy, "stale_samples")
        bound = _bound(evidence, policy)
        if deviation <= (max(bound, _OF_STALE_SAMPLES) if stale else bound):
            continue
        growth = fmean(deviations[:_NEWEST])
        earlier = f", after {growth:.2g}" if deviation > _GROWTH * growth else ""
        if stale:
            share = f"{stale / samples:.0%} of its samples are" if samples else "samples are"
            reason, key = f"{share} of an older version", "max_staleness"
        else:
            remedy, key = _remedy(evidence, policy)
            reason = f"rounding is below {bound:g}, and no sample is of an older version; {remedy}"
        yield Finding(
            "drifting probabilities",
            None,
            f"trainer and engine differ on the probabilities of the tokens of {policy} by {deviation:.2g} of their "
            f"value in the mean{earlier}; {reason}",
            key,
        )


def _bound(evidence: Evidence, policy: str) -> float:
    """``LossConfig.deviation_bound`` of the policy; infinity if the run has no model whose precision is known."""
    bound = evidence.config.get(f"policies.{policy}.algorithm.ratio_deviation_warning")
    if isinstance(bound, int | float):
        return float(bound)
    match evidence.config.get(f"policies.{policy}.model.dtype"):
        case "bfloat16":
            return 0.1
        case "float32":
            return 0.01
    return math.inf


def _remedy(evidence: Evidence, policy: str) -> tuple[str, str]:
    """In words, and the key."""
    if evidence.config.get(f"policies.{policy}.algorithm.correction") == "none":
        return "a correction weights the tokens by it", f"policies.{policy}.algorithm.correction"
    if evidence.config.get(f"policies.{policy}.model.dtype") == "bfloat16":
        return "float32 rounds less", f"policies.{policy}.model.dtype"
    return "a proof of each version finds an engine with other weights", "weights.probe_every"
