"""Samples to the tensors of one forward: rows of similar length together, a bounded number of tokens each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....messages import Sample, Truncation
from ....truncated_scores import Truncations
from ...padding import MOST_TOKENS_PER_FORWARD, PaddedRows, TokenRow, pad_rows, split_by_length
from ...shards import divide
from .gang_rank import ALONE, GangRank

IDLE_ROWS: Final[list[TokenRow]] = [((0,), (0,))]
"""A forward of as little as possible, by a rank that has nothing to compute while the others do."""

ROUNDING: Final = {"float32": 1e-5, "bfloat16": 1e-2}
"""The most, about, that rounding changes a score by, which is a logarithm of a probability: by the model's dtype."""


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """``advantage``: one for all completion tokens, or ``[T]`` float32, one for each."""

    sample: Sample
    advantage: float | NDArray[np.float32]

    @property
    def has_signal(self) -> bool:
        """True if a policy gradient of it is not 0: one of its tokens has an advantage."""
        return bool(self.advantage if isinstance(self.advantage, float) else self.advantage.any())


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of one forward: ``N`` completion tokens of ``R`` samples. ``indices``: the numbers of the samples.
    ``engine_logprobs`` and ``advantages`` ``[N]`` float32, ``rewards`` ``[R]`` float32, ``lengths`` ``[R]`` int64;
    ``temperatures``: one for all tokens, or ``[N]`` float64 if the samples differ. ``truncations``: of all tokens; None
    if no sample has one. ``idle``: it counts for nothing, and is computed because another rank of the gang has a
    forward more."""

    indices: list[int]
    rows: PaddedRows
    engine_logprobs: Tensor
    advantages: Tensor
    rewards: Tensor
    lengths: Tensor
    temperatures: float | Tensor
    truncations: Truncations | None = None
    idle: bool = False


def make_chunks(
    trained: Sequence[TrainedSample],
    vocab_size: int,
    device: torch.device,
    gang: GangRank = ALONE,
    most_tokens: int = MOST_TOKENS_PER_FORWARD,
    rounding: float = ROUNDING["float32"],
) -> list[Chunk]:
    """The forwards of this rank: every sample is in exactly one chunk of one rank, and all ranks have as many chunks.

    The samples are divided by their tokens. ``rounding``: of scores, see ``Truncations``. Raises ``ValueError`` as
    ``pad_rows`` does.
    """
    lengths = np.array([len(t.sample.prompt_tokens) + len(t.sample.tokens) for t in trained], np.int64)
    groups = [
        [share[indices].tolist() for indices in split_by_length(lengths[share], most_tokens=most_tokens)]
        for share in divide(lengths, gang.size)
    ]
    chunks = [_chunk(trained, indices, vocab_size, device, rounding) for indices in groups[gang.rank]]
    idle = max(map(len, groups)) - len(chunks)
    return chunks + [idle_chunk(device) for _ in range(idle)]


def idle_chunk(device: torch.device) -> Chunk:
    """Returns a forward of one token that has no weight. All ranks of a gang must have as many forwards, else their
    collectives would wait for each other."""
    zero, length = torch.zeros(1, device=device), torch.ones(1, dtype=torch.int64, device=device)
    return Chunk([], pad_rows(IDLE_ROWS, 1).to(device), zero, zero, zero, length, 1.0, idle=True)


def _chunk(
    trained: Sequence[TrainedSample],
    indices: list[int],
    vocab_size: int,
    device: torch.device,
    rounding: float,
) -> Chunk:
    samples = [trained[index].sample for index in indices]
    rows = pad_rows([(sample.prompt_tokens, sample.tokens) for sample in samples], vocab_size)
    engine = np.concatenate([np.array(sample.logprobs, np.float32) for sample in samples])
    lengths = [len(sample.tokens) for sample in samples]
    advantages = _token_advantages([trained[index].advantage for index in indices], lengths)
    return Chunk(
        indices,
        rows.to(device),
        torch.from_numpy(engine).to(device),
        torch.from_numpy(advantages).to(device),
        torch.tensor([sample.reward for sample in samples], device=device),
        torch.tensor(lengths, device=device),
        _temperatures(samples, lengths, device),
        _truncations(samples, lengths, device, rounding),
    )


def _temperatures(samples: Sequence[Sample], lengths: Sequence[int], device: torch.device) -> float | Tensor:
    """One number for all tokens if the samples agree, as they do unless agents share the policy: that is cheaper."""
    temperatures = [sample.temperature for sample in samples]
    if min(temperatures) == max(temperatures):
        return temperatures[0]
    return torch.from_numpy(np.repeat(np.array(temperatures), lengths)).to(device)


def _truncations(
    samples: Sequence[Sample], lengths: Sequence[int], device: torch.device, rounding: float
) -> Truncations | None:
    truncations = [sample.truncation for sample in samples]
    if not any(truncations):
        return None
    of_samples = Truncations.of([truncation or Truncation() for truncation in truncations], device)
    return of_samples.repeated(torch.tensor(lengths, device=device), rounding)


def _token_advantages(
    advantages: Sequence[float | NDArray[np.float32]], lengths: Sequence[int]
) -> NDArray[np.float32]:
    """``[N]``. One call for all samples: making an array of each costs as much as the rest of a small chunk."""
    constants = [advantage for advantage in advantages if isinstance(advantage, float)]
    if len(constants) == len(advantages):
        return np.repeat(np.array(constants, np.float32), lengths)
    rows = [np.broadcast_to(np.float32(a), n) for a, n in zip(advantages, lengths, strict=True)]
    return np.concatenate(rows)
