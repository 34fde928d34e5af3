"""Truncated distributions on the device: one definition for the engine that draws and the trainer that learns.

The trainer computes a truncation again from its own scores. Both sides round their scores differently, so a token at
the edge of the support may be in one side's and not in the other's: the trainer counts such tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import torch
from torch import Tensor

from .messages import Truncation

_EVERY_TOKEN: Final = 2**62
_ANY_MASS: Final = 2.0
_FIRST_RANKS: Final = 1024


@dataclass(frozen=True, slots=True)
class Truncations:
    """The truncations of n distributions. ``top_k``: int64 [n, 1], ``top_p``: float64 [n, 1], ``log_min_p``: float64
    [n, 1], each None if all of them are off. ``most_k``: the largest ``top_k``; ``all_have_k``: each has one.

    ``unsure``: bool [n], written by ``masked_but``; None in an engine. True for distributions whose support differs if
    scores differ by ``rounding``, and for tokens that are not in it. ``kept_edges``: those of the first scores, if more
    of the same will follow; None: none will.
    """

    top_k: Tensor | None
    top_p: Tensor | None
    log_min_p: Tensor | None
    most_k: int
    all_have_k: bool
    unsure: Tensor | None = None
    rounding: float = 0.0
    kept_edges: "list[_Edges] | None" = None

    @classmethod
    def of(cls, truncations: Sequence[Truncation], device: torch.device) -> "Truncations":
        """The truncations of n distributions, at least one, on ``device``. A field that no distribution uses is
        None, and costs nothing."""
        ks = [truncation.top_k or _EVERY_TOKEN for truncation in truncations]
        ps = [_ANY_MASS if truncation.top_p == 1 else truncation.top_p for truncation in truncations]
        shares = [truncation.min_p for truncation in truncations]
        most_k = max((k for k in ks if k < _EVERY_TOKEN), default=0)
        return cls(
            _column(ks, torch.int64, device) if min(ks) < _EVERY_TOKEN else None,
            _column(ps, torch.float64, device) if min(ps) < _ANY_MASS else None,
            _column(shares, torch.float64, device).log_() if max(shares) > 0 else None,
            most_k,
            max(ks) < _EVERY_TOKEN,
        )

    def repeated(self, counts: Sequence[int], rounding: float) -> "Truncations":
        """Distribution i ``counts[i]`` times, for ``masked_but``. The truncations are on the CPU."""
        times, total = torch.tensor(counts), sum(counts)
        unsure = torch.zeros(total, dtype=torch.bool)
        distributions = self._with_columns(
            lambda column: column.repeat_interleave(times, 0, output_size=total)
        )
        return replace(distributions, unsure=unsure, rounding=rounding)

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Truncations":
        """The same with each tensor changed, ``unsure`` too."""
        unsure = None if self.unsure is None else change(self.unsure)
        return replace(self._with_columns(change), unsure=unsure)

    def split(self, size: int) -> "list[Truncations]":
        """Parts of ``size`` distributions, whose ``unsure`` are views. Each is for one computation of scores and its
        repetition in the backward, which does not rank them again."""
        assert self.unsure is not None, "it is a trainer's"
        starts = range(0, len(self.unsure), size)
        return [self._part(slice(start, start + size), self.unsure) for start in starts]

    def _part(self, rows: slice, unsure: Tensor) -> "Truncations":
        return replace(self._with_columns(lambda column: column[rows]), unsure=unsure[rows], kept_edges=[])

    def _with_columns(self, change: Callable[[Tensor], Tensor]) -> "Truncations":
        columns = (
            None if column is None else change(column) for column in (self.top_k, self.top_p, self.log_min_p)
        )
        top_k, top_p, log_min_p = columns
        return replace(self, top_k=top_k, top_p=top_p, log_min_p=log_min_p)

    def masked(self, scores: Tensor) -> Tensor:
        """``scores``, [n, vocabulary], with minus infinity for the tokens that are never drawn."""
        return scores.masked_fill(scores < self._edges(scores).lowest, -torch.inf)

    def masked_but(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """As ``masked``, with a gradient. ``tokens`` (int64 [n]) keep their scores: they were drawn, and so belong to
        the support. Writes ``unsure``."""
        assert self.unsure is not None, "it is a trainer's"
        with torch.no_grad():
            edges = self.kept_edges[0] if self.kept_edges else self._edges(scores)
            outside = scores < edges.lowest
            if not self.kept_edges:
                drawn_outside = outside.gather(1, tokens.unsqueeze(1)).squeeze(1)
                self.unsure.copy_(drawn_outside | edges.are_close(scores, self.rounding))
            if self.kept_edges is not None:
                self.kept_edges[:] = [edges]
            outside.scatter_(1, tokens.unsqueeze(1), False)
        return scores.masked_fill(outside, -torch.inf)

    @torch.no_grad()
    def _edges(self, scores: Tensor) -> "_Edges":
        share = rank = mass_moves = None
        if self.log_min_p is not None:
            share = (scores.amax(-1, keepdim=True) + self.log_min_p).to(scores.dtype)
        if self.top_k is not None or self.top_p is not None:
            rank, mass_moves = self._rank_edge(scores, share, self._first_ranks)
        return _Edges(share, rank, mass_moves)

    @property
    def _first_ranks(self) -> int:
        """Ranks that are enough for every distribution, if the settings show it, and else for most of them."""
        return self.most_k if self._ranks_suffice else _FIRST_RANKS

    @property
    def _ranks_suffice(self) -> bool:
        """True if no distribution reaches beyond rank ``most_k``: those without ``top_k`` leave all tokens."""
        return self.all_have_k or self.top_p is None

    def _rank_edge(self, scores: Tensor, share: Tensor | None, ranks: int) -> tuple[Tensor, Tensor]:
        """``rank`` and ``mass_moves`` of ``_Edges``. Looks at the first ``ranks`` tokens of each distribution, and at
        all tokens of those that have more: ranking all of a large vocabulary takes ten times as long."""
        size = scores.shape[-1]
        count = min(ranks, size)
        ranked = scores.topk(count, -1).values
        every = torch.full_like(ranked[:, :1], _EVERY_TOKEN, dtype=torch.int64)
        top_k = every if self.top_k is None else self.top_k
        last = (top_k - 1).clamp(max=count - 1)
        is_beyond = top_k > count
        leaves_all = top_k == _EVERY_TOKEN
        mass_moves = torch.zeros_like(leaves_all)
        if self.top_p is not None:
            before, beyond = _masses_before(scores, ranked, share, last, is_beyond, self.all_have_k)
            last = last.minimum(_last_within(before, self.top_p))
            narrow, wide = (
                _last_within(before, self.top_p + change) for change in (-self.rounding, self.rounding)
            )
            mass_moves = (narrow != wide) & (self.top_p < _ANY_MASS)
            # With top_k the total is that of its tokens alone, of which some are not ranked yet.
            is_beyond &= (beyond < self.top_p + self.rounding) | (top_k < _EVERY_TOKEN)
            leaves_all = leaves_all & (self.top_p == _ANY_MASS)
        rank = ranked.gather(1, last).masked_fill(leaves_all, -torch.inf)
        if share is not None:
            is_beyond &= ranked[:, -1:] >= share
        if count == size or self._ranks_suffice:
            return rank, mass_moves
        # The one wait for the device: to rank all tokens of all distributions instead takes longer.
        rows = (is_beyond & ~leaves_all).squeeze(1).nonzero().squeeze(1)
        if len(rows):
            of_rows = self._with_columns(lambda column: column[rows])
            rank[rows], mass_moves[rows] = of_rows._rank_edge(
                scores[rows], None if share is None else share[rows], size
            )
        return rank, mass_moves


def _masses_before(
    scores: Tensor,
    ranked: Tensor,
    share: Tensor | None,
    last: Tensor,
    is_beyond: Tensor,
    all_ranked: bool,
) -> tuple[Tensor, Tensor]:
    """The probability of all tokens of lower rank, float64 [n, ranks], and of all ``ranked`` ones, float64 [n, 1],
    among the tokens that ``share`` and the rank ``last`` leave, or ``share`` alone if ``is_beyond``,
    as none is if ``all_ranked``."""
    mask = ranked >= ranked.gather(1, last)
    if share is not None:
        mask &= ranked >= share
    ranked = ranked.masked_fill(~mask, -torch.inf)
    total = ranked.logsumexp(-1, keepdim=True)
    if scores.shape[-1] > ranked.shape[-1] and not all_ranked:
        counted = scores if share is None else scores.masked_fill(scores < share, -torch.inf)
        total = torch.where(is_beyond, counted.logsumexp(-1, keepdim=True), total)
    masses = (ranked - total).exp()
    summed = masses.cumsum(-1, dtype=torch.float64)
    return summed - masses, summed[:, -1:]


@dataclass(frozen=True, slots=True)
class _Edges:
    """The lowest scores of n supports, [n, 1]. ``share``: by ``min_p``. ``rank``: by ``top_k`` and ``top_p``, the score
    of the last token that they leave, minus infinity if they leave all. ``mass_moves``: bool [n, 1], ``top_p`` leaves
    more or fewer tokens if it differs by the rounding. None: not in use."""

    share: Tensor | None
    rank: Tensor | None
    mass_moves: Tensor | None

    @property
    def lowest(self) -> Tensor:
        if self.share is None or self.rank is None:
            return cast(Tensor, self.rank if self.share is None else self.share)
        return self.share.maximum(self.rank)

    def are_close(self, scores: Tensor, rounding: float) -> Tensor:
        """bool [n]: a score is within ``rounding`` of an edge, besides the one that is the edge."""
        close = torch.zeros_like(scores[:, 0], dtype=torch.bool)
        if self.share is not None:
            close |= ((scores - self.share).abs() <= rounding).any(-1)
        if self.rank is not None:
            close |= ((scores - self.rank).abs() <= rounding).sum(-1) > 1
        if self.mass_moves is not None:
            close |= self.mass_moves.squeeze(1)
        return close


def _last_within(before: Tensor, mass: Tensor) -> Tensor:
    """The rank of the last token that ``mass`` leaves, int64 [n, 1]. ``before``: the probability of all tokens of lower
    rank, [n, ranks]."""
    return (before < mass).sum(-1, keepdim=True).clamp_(1) - 1


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)
