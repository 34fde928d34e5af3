"""The sums of a policy's optimizer step, and the figures that they give."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from ....messages import AgentShare
from ....names import AgentName
from ...objective import DIAGNOSTICS
from .forward_batches import TrainedSample
from .gang_rank import GangRank

_SUMS: Final = (*DIAGNOSTICS, "unsure")
_COUNTS: Final = ("trained_tokens", "positions", "padding")
_ADDED: Final = ("samples", "tokens", "stale", *_SUMS, *_COUNTS)


@dataclass(slots=True)
class StepTotals:
    """Sums over the micro-batches of this step. From ``loss`` to ``kl``: see ``DIAGNOSTICS``. ``values``: see
    ``value_sums``. ``unsure``: tokens, see ``Truncations``. ``stale``: samples of an older version. ``positions``: of
    the forwards' inputs, of which ``padding`` are. ``agent_tokens`` and ``agent_advantages``: by agent, its tokens and
    the sum of their ``|advantage|``; the latter empty with a critic."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    loss: float = 0.0
    clipped: float = 0.0
    deviation: float = 0.0
    surprisal: float = 0.0
    advantages: float = 0.0
    squared_advantages: float = 0.0
    kl: float = 0.0
    unsure: float = 0.0
    stale: int = 0
    positions: int = 0
    padding: int = 0
    values: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    agent_tokens: dict[str, int] = field(default_factory=dict)
    agent_advantages: dict[str, float] = field(default_factory=dict)

    def add(self, other: "StepTotals") -> None:
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.add_values(other.values)
        for agent, tokens in other.agent_tokens.items():
            self.agent_tokens[agent] = self.agent_tokens.get(agent, 0) + tokens
        for agent, total in other.agent_advantages.items():
            self.agent_advantages[agent] = self.agent_advantages.get(agent, 0.0) + total

    def note_agents(self, rows: Sequence[TrainedSample], advantages: bool) -> None:
        """Adds the tokens of all ``rows``, the same on each rank. ``advantages``: those of the rows are trained on."""
        for row in rows:
            agent, tokens = row.sample.agent, len(row.sample.tokens)
            self.agent_tokens[agent] = self.agent_tokens.get(agent, 0) + tokens
            if advantages:
                given = row.advantage
                total = abs(given) * tokens if isinstance(given, float) else float(np.abs(given).sum())
                self.agent_advantages[agent] = self.agent_advantages.get(agent, 0.0) + total

    def agent_shares(self, agents: Iterable[AgentName]) -> dict[AgentName, AgentShare]:
        """Shares of the policy's ``agents``; empty unless they are several and the step has tokens."""
        names, tokens = tuple(agents), sum(self.agent_tokens.values())
        if len(names) < 2 or not tokens:
            return {}
        pull = sum(self.agent_advantages.values())
        measured = 0.0 < pull < math.inf
        return {
            name: AgentShare(
                self.agent_tokens.get(name, 0) / tokens,
                self.agent_advantages.get(name, 0.0) / pull if measured else None,
            )
            for name in names
        }

    def add_values(self, sums: Iterable[float]) -> None:
        first, second, third, fourth = (a + b for a, b in zip(self.values, sums, strict=True))
        self.values = first, second, third, fourth

    def sum_over(self, gang: GangRank, device: torch.device) -> None:
        """Adds up the sums that each rank has of its own samples; the counts are those of the step already."""
        own = [*(getattr(self, name) for name in (*_SUMS, *_COUNTS)), *self.values]
        sums = gang.sum(torch.tensor(own, dtype=torch.float64, device=device)).tolist()
        self.set_sums(sums[: len(_SUMS)])
        for name, count in zip(_COUNTS, sums[len(_SUMS) :], strict=False):
            setattr(self, name, int(count))
        self.values = sums[-4], sums[-3], sums[-2], sums[-1]

    def set_sums(self, sums: Iterable[float]) -> None:
        """``sums``: ``DIAGNOSTICS``, and ``unsure``."""
        for name, value in zip(_SUMS, sums, strict=True):
            setattr(self, name, value)

    @property
    def clip_fraction(self) -> float:
        return self.clipped / max(1, self.trained_tokens)

    @property
    def ratio_deviation(self) -> float:
        return self.deviation / max(1, self.trained_tokens)

    @property
    def entropy(self) -> float:
        return self.surprisal / max(1, self.trained_tokens)

    @property
    def advantage_mean(self) -> float:
        return self.advantages / max(1, self.tokens)

    @property
    def advantage_std(self) -> float:
        variance = self.squared_advantages / max(1, self.tokens) - self.advantage_mean**2
        return math.sqrt(max(0.0, variance))

    @property
    def padding_share(self) -> float | None:
        return self.padding / self.positions if self.positions else None

    @property
    def value_loss(self) -> float:
        return self.values[3] / 2 / max(1, self.tokens)
