"""Samples to the tensors of one forward: rows of similar length together, a bounded number of tokens each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....expert_routes import ROUTES_COLUMN
from ....messages import Sample, Truncation
from ....routers import ReplayedRoutes
from ....truncated_scores import Truncations
from ...padding import (
    MOST_TOKENS_PER_FORWARD,
    PaddedRows,
    TokenRow,
    TokenRows,
    fill_forwards,
    pad_rows,
    split_by_length,
)
from ...shards import divide
from .device_copy import copy_together
from .gang_rank import ALONE, GangRank
from .row_routes import row_routes

IDLE_ROWS: Final[list[TokenRow]] = [((0,), (0,))]
"""A forward of as little as possible, by a rank that has nothing to compute while the others do."""

ROUNDING: Final = {"float32": 1e-5, "bfloat16": 1e-2}
"""The most, about, that rounding changes a score by, which is a logarithm of a probability: by the model's dtype."""


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """``advantage``: one for all completion tokens, or ``[T]`` float32, one for each.

    The rest is of a sample that is trained when the policy has changed since its step began, ``[T]`` float32 each, and
    None otherwise: ``old_logprobs`` are the log-probabilities of its tokens at the begin, ``returns`` are for a critic.
    All samples of a call have the same ones.
    """

    sample: Sample
    advantage: float | NDArray[np.float32]
    old_logprobs: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None

    @property
    def has_signal(self) -> bool:
        """True if a policy gradient of it is not 0: one of its tokens has an advantage."""
        return bool(self.advantage if isinstance(self.advantage, float) else self.advantage.any())


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of one forward: ``N`` completion tokens of ``R`` samples. ``indices``: the numbers of the samples.
    ``engine_logprobs`` and ``advantages`` ``[N]`` float32, ``rewards`` ``[R]`` float32, ``lengths`` and ``group_sizes``
    ``[R]`` int64, ``sizes`` the lengths on the host; ``temperatures``: one for all tokens, or ``[N]`` float64 if the
    samples differ. ``truncations``: of all tokens; None if no sample has one. ``old_logprobs`` and ``returns`` ``[N]``
    float32: those of ``TrainedSample``. ``columns``: those of a user's loss by name, ``[N]`` float32. ``tokens``: of
    the samples, prompts included; ``merged``: those of them that are not computed, as another sample has them in the
    same row. ``idle``: it counts for nothing, and is computed because another rank of the gang has a forward more."""

    indices: list[int]
    rows: PaddedRows
    engine_logprobs: Tensor
    advantages: Tensor
    rewards: Tensor
    lengths: Tensor
    group_sizes: Tensor
    sizes: list[int]
    temperatures: float | Tensor
    truncations: Truncations | None = None
    old_logprobs: Tensor | None = None
    returns: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    tokens: int = 0
    merged: int = 0
    idle: bool = False

    def to(self, device: torch.device) -> "Chunk":
        """The same on ``device``, by one copy. This process does not wait for it: on a GPU it is
        queued behind all that the device was given before."""
        host: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            host.append(tensor)
            return tensor

        self._with_tensors(note)
        copies = iter(copy_together(host, device))
        return self._with_tensors(lambda _: next(copies))

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Chunk":
        temperatures, truncations = self.temperatures, self.truncations
        return replace(
            self,
            rows=self.rows.with_tensors(change),
            engine_logprobs=change(self.engine_logprobs),
            advantages=change(self.advantages),
            rewards=change(self.rewards),
            lengths=change(self.lengths),
            group_sizes=change(self.group_sizes),
            temperatures=change(temperatures) if isinstance(temperatures, Tensor) else temperatures,
            truncations=None if truncations is None else truncations.with_tensors(change),
            old_logprobs=None if self.old_logprobs is None else change(self.old_logprobs),
            returns=None if self.returns is None else change(self.returns),
            columns={name: change(values) for name, values in self.columns.items()},
        )


class Chunks:
    """The forwards of a rank, each made when it is asked for: while a GPU computes one, the host makes the next."""

    def __init__(
        self,
        trained: Sequence[TrainedSample],
        rows: TokenRows,
        members: Sequence[Sequence[int]],
        groups: Sequence[NDArray[np.int64]],
        idle: int,
        device: torch.device,
        rounding: float,
        packed: bool,
    ) -> None:
        """``members``: by row, the numbers of its samples among ``trained``. ``groups``: by forward, the numbers of its
        ``rows``. ``idle``: forwards behind them that count for nothing. ``rounding``: of scores, see ``Truncations``.
        ``packed``: the rows of a forward lie end to end."""
        self._trained, self._rows, self._members = trained, rows, members
        self._groups, self._idle = groups, idle
        self._device, self._rounding = device, rounding
        self._packed = packed
        self._like = trained[0] if trained else None

    def __len__(self) -> int:
        return len(self._groups) + self._idle

    def samples(self, chunk: Chunk) -> list[Sample]:
        """The samples of a chunk, in the order of its tokens."""
        return [self._trained[index].sample for index in chunk.indices]

    def __iter__(self) -> Iterator[Chunk]:
        for group in self._groups:
            indices = [number for row in group.tolist() for number in self._members[row]]
            samples = [self._trained[index] for index in indices]
            rows = self._rows.packed(group) if self._packed else self._rows.padded(group)
            rows = replace(rows, routes=self._routes(group))
            chunk = _chunk(samples, indices, rows, int(self._rows.lengths[group].sum()), self._rounding)
            yield chunk.to(self._device)
        for _ in range(self._idle):
            yield idle_chunk(self._device, self._like)

    def _routes(self, group: NDArray[np.int64]) -> ReplayedRoutes | None:
        rows = [[self._trained[index].sample for index in self._members[row]] for row in group.tolist()]
        return row_routes(rows, packed=self._packed)


def make_chunks(
    trained: Sequence[TrainedSample],
    vocab_size: int,
    device: torch.device,
    gang: GangRank = ALONE,
    most_tokens: int = MOST_TOKENS_PER_FORWARD,
    rounding: float = ROUNDING["float32"],
    *,
    packed: bool = False,
) -> Chunks:
    """The forwards of this rank: every sample is in exactly one chunk of one rank, and all ranks have as many chunks.

    Samples that begin with each other are one row. The rows are divided by their tokens. ``rounding``: of scores, see
    ``Truncations``. ``packed``: those of a forward lie end to end, else they are padded. Raises ``ValueError`` as
    ``TokenRows.of`` does.
    """
    samples = [row.sample for row in trained]
    # Of all ranks: each divides the same rows, so that the turns of a trajectory are one rank's.
    rows, members = TokenRows.of(
        [(sample.prompt_tokens, sample.tokens) for sample in samples], vocab_size
    ).merged()
    divide_rows = fill_forwards if packed else split_by_length
    shares = divide(rows.lengths, gang.size)
    groups = [
        [share[group] for group in divide_rows(rows.lengths[share], most_tokens=most_tokens)]
        for share in shares
    ]
    idle = max(map(len, groups)) - len(groups[gang.rank])
    return Chunks(trained, rows, members, groups[gang.rank], idle, device, rounding, packed)


def idle_chunk(device: torch.device, like: TrainedSample | None = None) -> Chunk:
    """Returns a forward of one token that has no weight and that no loss function sees, with ``old_logprobs`` if
    samples ``like`` this one have them: the names of figures depend on it. All ranks of a gang must have as many
    forwards, else their collectives would wait for each other."""
    zero, length = torch.zeros(1), torch.ones(1, dtype=torch.int64)
    old_logprobs = zero if like is not None and like.old_logprobs is not None else None
    rows = pad_rows(IDLE_ROWS, 1)
    chunk = Chunk([], rows, zero, zero, zero, length, length, [1], 1.0, None, old_logprobs, idle=True)
    return chunk.to(device)


def _chunk(
    trained: Sequence[TrainedSample], indices: list[int], rows: PaddedRows, computed: int, rounding: float
) -> Chunk:
    """On the host, of ``trained``, whose tokens are those of ``rows``, ``computed`` of them."""
    samples = [row.sample for row in trained]
    tokens = sum(len(sample.prompt_tokens) + len(sample.tokens) for sample in samples)
    engine = np.concatenate([np.array(sample.logprobs, np.float32) for sample in samples])
    sizes = [len(sample.tokens) for sample in samples]
    advantages = _token_advantages([row.advantage for row in trained], sizes)
    return Chunk(
        indices,
        rows,
        torch.from_numpy(engine),
        torch.from_numpy(advantages),
        torch.tensor([sample.reward for sample in samples]),
        torch.tensor(sizes),
        torch.tensor([sample.group_size for sample in samples]),
        sizes,
        _temperatures(samples, sizes),
        _truncations(samples, sizes, rounding),
        _join([row.old_logprobs for row in trained]),
        _join([row.returns for row in trained]),
        {
            name: torch.from_numpy(np.concatenate([sample.columns[name] for sample in samples]))
            for name in samples[0].columns
            if name != ROUTES_COLUMN
        },
        tokens,
        tokens - computed,
    )


def _join(rows: Sequence[NDArray[np.float32] | None]) -> Tensor | None:
    present = [row for row in rows if row is not None]
    return torch.from_numpy(np.concatenate(present)) if present else None


def _temperatures(samples: Sequence[Sample], lengths: Sequence[int]) -> float | Tensor:
    """One number for all tokens if the samples agree, as they do unless agents share the policy: that is cheaper."""
    temperatures = [sample.temperature for sample in samples]
    if min(temperatures) == max(temperatures):
        return temperatures[0]
    return torch.from_numpy(np.repeat(np.array(temperatures), lengths))


def _truncations(samples: Sequence[Sample], lengths: Sequence[int], rounding: float) -> Truncations | None:
    truncations = [sample.truncation for sample in samples]
    if not any(truncations):
        return None
    # On the CPU, so that they come to the device by the copy of everything else.
    host = torch.device("cpu")
    of_samples = Truncations.of([truncation or Truncation() for truncation in truncations], host)
    return of_samples.repeated(lengths, rounding)


def _token_advantages(
    advantages: Sequence[float | NDArray[np.float32]], lengths: Sequence[int]
) -> NDArray[np.float32]:
    """``[N]``. One call for all samples: making an array of each costs as much as the rest of a small chunk."""
    constants = [advantage for advantage in advantages if isinstance(advantage, float)]
    if len(constants) == len(advantages):
        return np.repeat(np.array(constants, np.float32), lengths)
    rows = [np.broadcast_to(np.float32(a), n) for a, n in zip(advantages, lengths, strict=True)]
    return np.concatenate(rows)
