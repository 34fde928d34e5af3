"""The proof that an engine computes with the weights that were published. Pure.

A trainer publishes its weights with a probe: the likeliest tokens behind a few prompts, by these weights. An engine
that has loaded them decodes one token greedily behind each prompt. Its log-probabilities are the trainer's up to
rounding, unless a tensor was lost, stale, or taken over in the wrong way: weights that arrive in order may still
not be those that the engine computes with.

Rounding may turn a choice of experts, and change a log-probability by more than that. So an engine that can replays the
trainer's choices, and its own are compared apart.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import numpy as np

from ..expert_routes import Routes
from ..messages import LikelyTokens

PROBE_BOUNDS: Final = {"float32": 0.01, "bfloat16": 0.3}
"""The most that rounding changes a log-probability by, with a margin, by the model's dtype. It is 1e-6 in float32 on
CPUs, and about 1e-2 in bfloat16."""

OTHER_EXPERTS: Final = 3.0
"""Times the bound, for an answer that an engine has computed with other experts than the trainer, and could not compute
with the trainer's."""

CHOICE_BOUND: Final = 0.25
"""The largest share of a layer's choices of experts that rounding changes, with a margin: on CPUs it is 1e-3 in
bfloat16. A router without its weights makes 94 % other choices, if it takes 8 of 128 experts. Log-probabilities don't
show all that is wrong with it: a bias may decide about the choice alone."""

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


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's answer to a prompt of the probe. ``difference``: see ``least_difference``. ``other_choices``: see the
    function; empty if they are unknown. ``replayed``: it was computed with the trainer's experts all the same."""

    difference: float
    other_choices: tuple[float, ...] = ()
    replayed: bool = False

    @property
    def times_bound(self) -> float:
        """The difference may be so many times the bound."""
        return OTHER_EXPERTS if any(self.other_choices) and not self.replayed else 1.0


def other_choices(expected: Routes, chosen: Routes) -> tuple[float, ...]:
    """By layer, the share of the experts ``chosen`` that are not among the ``expected`` of their token. Empty if the
    two are not of the same tokens and layers."""
    if expected.shape != chosen.shape:
        return ()
    is_other = ~(chosen[..., None] == expected[..., None, :]).any(-1)
    # A layer without experts has any numbers, mostly zeros.
    has_experts = (expected != expected[:1, :, :1]).any((0, 2))
    return tuple(np.where(has_experts, is_other.mean((0, 2)), 0.0).tolist())


def _worst_layer(answers: Sequence[Answer]) -> tuple[int, float]:
    """The layer with the most other choices, and their share; 0.0 if they are unknown."""
    layers = zip(*(answer.other_choices for answer in answers if answer.other_choices), strict=True)
    share, layer = max(((fmean(shares), layer) for layer, shares in enumerate(layers)), default=(0.0, 0))
    return layer, share


def choice_problem(answers: Sequence[Answer]) -> str:
    """The words for the router that chooses too many other experts; empty without such a router."""
    layer, share = _worst_layer(answers)
    if share <= CHOICE_BOUND:
        return ""
    return (
        f"the router of layer {layer} makes other choices than the trainer's in {share:.0%}, and rounding changes "
        f"{CHOICE_BOUND:.0%} at most"
    )


def are_proven(answers: Sequence[Answer], bound: float) -> bool:
    """True if no difference exceeds ``bound``, and no router chooses too many other experts."""
    within = all(answer.difference <= bound * answer.times_bound for answer in answers)
    return within and not choice_problem(answers)


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


def failure(version: int, answers: Sequence[Answer], bound: float, wrong: str) -> str:
    """The reason for which an engine is given up that has loaded its weights twice, with ``answers`` to the second
    probe."""
    problem = choice_problem(answers)
    if not problem:
        worst = max(answers, key=lambda answer: answer.difference / answer.times_bound)
        times = "" if worst.times_bound == 1.0 else f", times {worst.times_bound:g} for other experts"
        problem = (
            f"a log-probability differs from the trainer's by {worst.difference:.3g}, the bound is {bound:g} "
            f"(weights.probe_bound{times})"
        )
    return f"it does not compute with version {version}, which it has loaded twice: {problem}; {wrong}"
