"""The proof that an engine computes with the weights that were published. Pure.

A trainer publishes its weights with a probe: the likeliest tokens behind a few prompts, by these weights. An engine
that has loaded them decodes one token greedily behind each prompt. Its log-probabilities are the trainer's up to
rounding, unless a tensor was lost, stale, or taken over in the wrong way: weights that arrive in order may still
not be those that the engine computes with.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ..messages import LikelyTokens

PROBE_BOUNDS: Final = {"float32": 0.01, "bfloat16": 0.3}
"""The most that rounding changes a log-probability by, with a margin, by the model's dtype. It is 1e-6 in float32 on
CPUs, and about 1e-2 in bfloat16."""

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDING: Final = ("embed", "wte", "wpe")
_HEAD: Final = ("lm_head", "embed_out")


def least_difference(expected: LikelyTokens, token: int, logprob: float) -> float:
    """The least that the log-probabilities of two distributions differ by, if ``expected`` has the likeliest tokens of
    one, and ``token`` is the likeliest of the other, with ``logprob``.

    The token itself may differ from the trainer's: of two that are nearly as likely, rounding decides.
    """
    behind = expected.logprobs[0] - logprob
    if token not in expected.tokens:
        return max(behind, logprob - expected.logprobs[-1])
    return max(behind, abs(logprob - expected.logprobs[expected.tokens.index(token)]))


def are_proven(differences: Iterable[float], bound: float | None) -> bool:
    """True if no difference exceeds ``bound``. None: the engine's weights are others on purpose, nothing is decided."""
    return bound is None or all(difference <= bound for difference in differences)


def diagnosis(
    published: Mapping[str, int], first: Mapping[str, int], second: Mapping[str, int], problem: str = ""
) -> str:
    """Names an engine's tensors that were wrong after a first load, by the digests of those that were published, and
    of the engine's after the first and the second load. ``problem``: the reason for which those published are missing.

    An engine may have tensors of its own, such as several matrices in one: these are compared with their state after
    the second load.
    """
    if not first:
        return "the engine can't be asked which of its tensors are wrong"
    wrong = [
        name for name, digest in first.items() if digest != published.get(name, second.get(name, digest))
    ]
    if wrong:
        return f"wrong: {_in_groups(wrong)}"
    if problem:
        return f"the wrong tensors are unknown: those published can't be compared ({problem})"
    if first.keys() <= published.keys():
        return "all of its tensors are as they were published"
    return "the wrong tensors are unknown: it has joined or packed them, and the second load has changed none"


def group_of(tensor: str) -> str:
    """The part of a model that a tensor belongs to: a layer, the embedding, the head, or itself."""
    if (layer := _LAYER.search(tensor)) is not None:
        return f"layer {layer[1]}"
    if any(name in tensor for name in _HEAD):
        return "the head"
    return "the embedding" if any(name in tensor for name in _EMBEDDING) else tensor


def _in_groups(tensors: Sequence[str]) -> str:
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(group_of(name), []).append(name)
    return ", ".join(
        group
        if names == [group]
        else f"{group} ({names[0]}{f' and {len(names) - 1} more' if names[1:] else ''})"
        for group, names in groups.items()
    )


def failure(version: int, difference: float, bound: float | None, wrong: str) -> str:
    """The reason for which an engine is given up that has loaded its weights twice."""
    limit = math.inf if bound is None else bound
    return (
        f"it does not compute with version {version}, which it has loaded twice: a log-probability differs from the "
        f"trainer's by {difference:.3g}, the bound is {limit:g} (weights.probe_bound); {wrong}"
    )
