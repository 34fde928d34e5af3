"""Token sampling: each token is a pure function of (request seed, token index, distribution).

The uniform random number is output number ``index`` of SplitMix64 (Steele, Lea & Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014) for a state derived from the seed. It is counter-based, so it does
not depend on the other requests in the batch. The token is the inverse of the cumulative distribution at it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....messages import Truncation
from ....truncated_scores import Truncations

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK_64 = (1 << 64) - 1
# 48 random bits: the largest number, 1 - 2**-48, is below a sum of probabilities rounded in float64.
_DROPPED_BITS = np.uint64(16)
_UNIFORM_STEP = 2.0**-48


def stream_keys(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """The 64-bit states of the streams of ``seeds``. Mixed, so that the streams of neighbouring seeds don't overlap."""
    return _mix(np.array([seed & _MASK_64 for seed in seeds], dtype=np.uint64) ^ _GOLDEN_GAMMA)


def uniforms(keys: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers ``indices`` of the streams ``keys``, float64 in [0, 1); the shapes broadcast."""
    state = keys + (indices + 1).astype(np.uint64) * _GOLDEN_GAMMA
    return (_mix(state) >> _DROPPED_BITS).astype(np.float64) * _UNIFORM_STEP


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer; arithmetic modulo 2**64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Sampling:
    """The temperatures and truncations of n sequences, on the device. None: no sequence needs the field.

    ``divisor``: float64 [n, 1], 1 for greedy sequences. ``greedy``: bool [n, 1]. ``truncations``: of the sequences
    ``truncated`` (int64 [m]) alone, so that the others cost nothing.
    """

    divisor: Tensor | None
    greedy: Tensor | None
    truncations: Truncations | None = None
    truncated: Tensor | None = None

    @classmethod
    def of(
        cls,
        temperatures: Sequence[float],
        device: torch.device,
        truncations: Sequence[Truncation | None] = (),
    ) -> "Sampling":
        """The sampling of n sequences. ``temperatures``: n, at least 0; 0 for greedy. ``truncations``: n, or none at
        all; that of a greedy sequence is left out, since the most probable token is in every support."""
        distinct = set(temperatures)
        divisor = greedy = None
        if distinct - {0.0, 1.0}:
            divisors = [temperature or 1.0 for temperature in temperatures]
            divisor = torch.tensor(divisors, dtype=torch.float64, device=device).unsqueeze(1)
        if 0.0 in distinct:
            greedy = torch.tensor(
                [temperature == 0 for temperature in temperatures], device=device
            ).unsqueeze(1)
        cut = [
            (row, truncation)
            for row, truncation in enumerate(truncations)
            if truncation is not None and temperatures[row] > 0
        ]
        if not cut:
            return cls(divisor, greedy)
        rows, row_truncations = zip(*cut, strict=True)
        return cls(
            divisor, greedy, Truncations.of(row_truncations, device), torch.tensor(rows, device=device)
        )


def sample_tokens(logits: Tensor, points: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Samples one token per row; returns the tokens and their log-probabilities: int64 [n, 1], float64 [n, 1].

    ``logits``: [n, vocabulary], any float type; ``points``: float64 [n, 1], uniform in [0, 1). A row of logits that are
    not finite gets a log-probability that is not finite.
    """
    # float64: over a large vocabulary, a running sum in float32 would misplace the rare tokens
    logits = logits.double()
    if sampling.divisor is not None:
        # the maximum is subtracted first: a small temperature must not overflow
        logits = (logits - logits.amax(-1, keepdim=True)) / sampling.divisor
    if sampling.truncations is not None and sampling.truncated is not None:
        rows = sampling.truncated
        masked = sampling.truncations.masked(logits.index_select(0, rows))
        logits = logits.index_copy(0, rows, masked)
    probabilities = torch.softmax(logits, -1)
    tokens = torch.searchsorted(torch.cumsum(probabilities, -1), points, right=True)
    tokens.clamp_(max=logits.shape[-1] - 1)  # only a row of NaN is beyond the last token
    if sampling.greedy is not None:
        tokens = torch.where(sampling.greedy, logits.argmax(-1, keepdim=True), tokens)
    return tokens, probabilities.gather(1, tokens).log_()
