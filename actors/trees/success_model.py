"""The predictor of success that the trees of a run share, and the price of their candidates: logistic regression over
the words of a prefix, and a number that follows a budget. Pure.

    groups of a step close ─> PrefixEnd ... ─> learn ─> the next step begins: its trees get the weights ─> predict

A prefix is the place of a line before a round: the prompts that its agents are asked with. The predictor learns from
the groups of the whole run, and its weights and the price are a part of the run's state: a run that is resumed branches
as it would have branched.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import xxhash

FEATURES: Final = 1024
"""Places that words are hashed to."""
_RATE: Final = 0.5
_WORDS: Final = 256
"""Words of a prompt that count, the last ones: the state of the environment is in the newest prompt."""
_PRICE_RATE: Final = 0.3
_MOST: Final = 64.0
"""The price stays within this and its reciprocal: without trees that can be widened, it would grow without end."""


@dataclass(frozen=True, slots=True)
class PrefixEnd:
    """A prefix, once its lines have ended. ``features``: by ``prefix_features``. ``success``: the share of its lines
    that succeeded. ``lines``: their number. ``excess``: of the first prefix of a tree, by ``BranchRule.excess``; None
    for the others, and without a budget."""

    features: tuple[int, ...]
    success: float
    lines: int
    excess: float | None = None


def prefix_features(prompts: Mapping[str, str], rounds: int) -> tuple[int, ...]:
    """Returns the places of a prefix's features, in order, each once: its words by agent, whole prompts, and the number
    of ``rounds`` before it. ``prompts``: the newest, by agent."""
    names = [f"round {rounds}"]
    for agent, prompt in prompts.items():
        names.append(f"prompt {agent} {prompt}")
        names += [f"word {agent} {word}" for word in prompt.split()[-_WORDS:]]
    return tuple(sorted({xxhash.xxh3_64_intdigest(name.encode()) % FEATURES for name in names}))


class SuccessModel:
    """``state``: of an earlier model. Without it the model predicts 1/2 for all prefixes, and the price is 1."""

    def __init__(self, state: Sequence[float] = ()) -> None:
        """Raises ValueError for a state of another size."""
        if state and len(state) != FEATURES + 1:
            raise ValueError(f"{len(state)} numbers, needs {FEATURES} weights and a price")
        self.weights = [*state[:FEATURES]] if state else [0.0] * FEATURES
        self.price = state[FEATURES] if state else 1.0

    @property
    def state(self) -> list[float]:
        """The weights and the price."""
        return [*self.weights, self.price]

    def predict(self, features: Sequence[int]) -> float:
        """Returns the chance that a line behind the prefix succeeds: ``sigmoid(w . x)``, where ``x`` is ``n ** -0.5``
        in the ``n`` places of ``features``."""
        score = math.fsum(self.weights[place] for place in features) / math.sqrt(len(features))
        return 1.0 / (1.0 + math.exp(-score)) if score >= 0 else 1.0 - 1.0 / (1.0 + math.exp(score))

    def learn(self, ends: Sequence[PrefixEnd]) -> None:
        """Learns from the trees of a step: a step along the gradient of the log-likelihood for each prefix, in order.
        The rate is constant: the policy changes, and old groups are forgotten. The price is multiplied by
        ``exp(0.3 * mean excess)``, at most by e: if a step has more lines than its budget, a candidate of the next one
        costs more."""
        for end in ends:
            error = end.success - self.predict(end.features)
            for place in end.features:
                self.weights[place] += _RATE * error / math.sqrt(len(end.features))
        if excesses := [end.excess for end in ends if end.excess is not None]:
            self.price *= math.exp(min(1.0, _PRICE_RATE * fmean(excesses)))
            self.price = min(_MOST, max(1.0 / _MOST, self.price))
