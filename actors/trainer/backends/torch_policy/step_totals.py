"""The sums of a policy's optimizer step, and the figures that they give."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ....figures import Numbers, divide_sums
from ....names import AgentName
from .forward_batches import TrainedSample
from .gang_rank import GangRank

_COUNTS: Final = ("trained_tokens", "compared_tokens", "positions", "sample_tokens")


@dataclass(slots=True)
class StepTotals:
    """Sums over the micro-batches of this step. ``sums``: by the name of their figure, see ``batch_loss``. ``values``:
    see ``value_sums``. ``stale``: samples of an older version. ``compared_tokens``: those of the trained tokens whose
    probabilities at the step's begin are known. ``positions``: of the forwards' inputs. ``sample_tokens``: of the
    samples in them, prompts included. ``agent_tokens`` and ``agent_advantages``: by agent, its tokens and the sum of
    their ``|advantage|``; the latter empty with a critic."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    compared_tokens: int = 0
    stale: int = 0
    positions: int = 0
    sample_tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    values: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    agent_tokens: dict[str, int] = field(default_factory=dict)
    agent_advantages: dict[str, float] = field(default_factory=dict)

    def add(self, other: "StepTotals") -> None:
        """Adds the sums of ``other``, a micro-batch of the same step."""
        for name in ("samples", "tokens", "stale", *_COUNTS):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.add_sums(other.sums)
        self.add_values(other.values)
        for agent, tokens in other.agent_tokens.items():
            self.agent_tokens[agent] = self.agent_tokens.get(agent, 0) + tokens
        for agent, total in other.agent_advantages.items():
            self.agent_advantages[agent] = self.agent_advantages.get(agent, 0.0) + total

    def add_sums(self, sums: Mapping[str, float]) -> None:
        """Adds ``sums``, by the names of their figures; missing ones count as 0."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def note_agents(self, rows: Sequence[TrainedSample], advantages: bool) -> None:
        """Adds the tokens of all ``rows``, the same on each rank. ``advantages``: those of the rows are trained on."""
        for row in rows:
            agent, tokens = row.sample.agent, len(row.sample.tokens)
            self.agent_tokens[agent] = self.agent_tokens.get(agent, 0) + tokens
            if advantages:
                advantage = row.advantage
                total = (
                    abs(advantage) * tokens
                    if isinstance(advantage, float)
                    else float(np.abs(advantage).sum())
                )
                self.agent_advantages[agent] = self.agent_advantages.get(agent, 0.0) + total

    def agent_shares(self, agents: Iterable[AgentName]) -> dict[AgentName, Numbers]:
        """Shares of the policy's ``agents``: of the tokens, and of the sum of ``|advantage|`` over them. The latter is
        missing if all are 0, and with a critic. Empty unless the agents are several and the step has tokens."""
        names, tokens = tuple(agents), sum(self.agent_tokens.values())
        if len(names) < 2 or not tokens:
            return {}
        shares: dict[AgentName, Numbers] = {
            name: {"token_share": self.agent_tokens.get(name, 0) / tokens} for name in names
        }
        total = sum(self.agent_advantages.values())
        if 0.0 < total < math.inf:
            for name, share in shares.items():
                share["advantage_share"] = self.agent_advantages.get(name, 0.0) / total
        return shares

    def add_values(self, sums: Iterable[float]) -> None:
        """Adds the four sums of ``value_sums``: of a critic's values and returns over tokens."""
        first, second, third, fourth = (a + b for a, b in zip(self.values, sums, strict=True))
        self.values = first, second, third, fourth

    def read(self, names: Sequence[str], sums: Tensor, values: Tensor, gang: GangRank) -> None:
        """Adds ``sums`` ``[len(names)]`` and ``values`` ``[4]`` float64, which are on the device: the one wait for it.

        Over a gang, all of this micro-batch's sums that each rank has of its own samples are added up; ``samples``,
        ``tokens`` and ``stale`` are those of all ranks already. All ranks have the same ``names`` in the same order:
        see ``batch_loss``."""
        on_device = torch.cat([sums.to(values.dtype), values])
        host_names = list(self.sums)
        if gang.size > 1:
            host = [*self.sums.values(), *(getattr(self, name) for name in _COUNTS)]
            on_device = torch.cat([on_device, torch.tensor(host, dtype=values.dtype).to(values.device)])
            gang.sum(on_device)
        numbers = on_device.tolist()
        of_names, of_values = numbers[: len(names)], numbers[len(names) : len(names) + 4]
        if host := numbers[len(names) + 4 :]:
            self.sums = dict(zip(host_names, host, strict=False))
            for name, count in zip(_COUNTS, host[len(host_names) :], strict=True):
                setattr(self, name, int(count))
        self.add_sums(dict(zip(names, of_names, strict=True)))
        self.add_values(of_values)

    def figures(self, divisor: int) -> Numbers:
        """The figures that are means. ``divisor``: of the loss."""
        counts = {name: getattr(self, name) for name in ("tokens", *_COUNTS)}
        figures = divide_sums("policy", self.sums, {**counts, "divisor": divisor})
        # The mean of squares is needed for the deviation alone.
        squares = self.sums.get("advantage_squares", 0.0) / max(1, self.tokens)
        figures["advantage_std"] = math.sqrt(max(0.0, squares - figures["advantage_mean"] ** 2))
        return figures

    @property
    def ratio_deviation(self) -> float:
        """The mean over the compared tokens of ``|ratio - 1|``, between trainer and engine; 0 without tokens."""
        return self.sums.get("ratio_deviation", 0.0) / max(1, self.compared_tokens)

    @property
    def value_loss(self) -> float:
        """Half the mean squared error of the critic's values, over all tokens of the step."""
        return self.values[3] / 2 / max(1, self.tokens)
