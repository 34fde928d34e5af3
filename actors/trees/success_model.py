"""The predictor of success that the trees of a run share: logistic regression over the words of a prefix. Pure.

    groups of a step close ─> PrefixEnd ... ─> learn ─> the next step begins: its trees get the weights ─> predict

A prefix is the place of a line before a round: the prompts that its agents are asked with. The predictor learns from
the groups of the whole run, and its weights are a part of the run's state: a run that is resumed predicts as it would
have predicted.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

FEATURES: Final = 1024
"""Places that words are hashed to."""
_RATE: Final = 0.5
_WORDS: Final = 256
"""Words of a prompt that count, the last ones: the state of the environment is in the newest prompt."""


@dataclass(frozen=True, slots=True)
class PrefixEnd:
    """A prefix, once its lines have ended. ``features``: by ``prefix_features``. ``success``: the share of its lines
    that succeeded. ``lines``: their number."""

    features: tuple[int, ...]
    success: float
    lines: int


def prefix_features(prompts: Mapping[str, str], rounds: int) -> tuple[int, ...]:
    """Returns the places of a prefix's features, in order, each once: its words by agent, whole prompts, and the number
    of ``rounds`` before it. ``prompts``: the newest, by agent."""
    names = [f"round {rounds}"]
    for agent, prompt in prompts.items():
        names.append(f"prompt {agent} {prompt}")
        names += [f"word {agent} {word}" for word in prompt.split()[-_WORDS:]]
    return tuple(sorted({xxhash.xxh3_64_intdigest(name.encode()) % FEATURES for name in names}))


class SuccessModel:
    """``weights``: ``FEATURES`` numbers; without them it predicts 1/2 for all prefixes."""

    def __init__(self, weights: Sequence[float] = ()) -> None:
        """Raises ValueError for another number of weights."""
        if weights and len(weights) != FEATURES:
            raise ValueError(f"{len(weights)} weights, needs {FEATURES}")
        self.weights = [*weights] if weights else [0.0] * FEATURES

    def predict(self, features: Sequence[int]) -> float:
        """Returns the chance that a line behind the prefix succeeds: ``sigmoid(w . x)``, where ``x`` is ``n ** -0.5``
        in the ``n`` places of ``features``."""
        score = math.fsum(self.weights[place] for place in features) / math.sqrt(len(features))
        return 1.0 / (1.0 + math.exp(-score)) if score >= 0 else 1.0 - 1.0 / (1.0 + math.exp(score))

    def learn(self, ends: Iterable[PrefixEnd]) -> None:
        """A step along the gradient of the log-likelihood for each prefix, in order. The rate is constant: the policy
        changes, and old groups are forgotten."""
        for end in ends:
            error = end.success - self.predict(end.features)
            for place in end.features:
                self.weights[place] += _RATE * error / math.sqrt(len(end.features))
