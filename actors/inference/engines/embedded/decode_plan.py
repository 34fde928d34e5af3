"""Plans of several decode steps over the same rows.

While no sequence joins or leaves, everything that a step needs except the tokens is known in advance: positions, cache
cells, masks and random numbers are functions of the step's number. They are computed for all steps of a plan at once,
and sampled tokens are distributed to the rows only at its end: a step does no work per row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine import EngineRequest, EngineResult, FinishReason, Phases
from .slot_cache import COLUMN_STEP, SlotCache, round_up
from .token_sampling import Sampling, uniforms

# Longer plans attend to more columns that are still empty, shorter ones are prepared more often.
PLAN_STEPS = 2 * COLUMN_STEP


@dataclass(slots=True)
class ActiveSequence:
    """A sequence in the batch. ``key`` (uint64): the state of its random stream (``token_sampling.stream_keys``)."""

    request: EngineRequest
    key: np.uint64
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        """The position of the newest token, which is not in the cache yet."""
        return len(self.request.prompt_tokens) + len(self.tokens) - 1

    @property
    def stream_index(self) -> int:
        """The index of its next random number."""
        return self.request.resumed_tokens + len(self.tokens)

    @property
    def steps_left(self) -> int:
        """Tokens that it may still generate; at 0 it ends by its length."""
        return self.request.max_new_tokens - len(self.tokens)

    def add(self, token: int, logprob: float) -> None:
        """Appends a sampled token. ``logprob``: in nats, under the distribution that it was drawn from."""
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def result(self, reason: FinishReason, phases: Phases, routes: Tensor | None = None) -> EngineResult:
        """The tokens and log-probabilities generated so far, as the answer to its request. ``routes``: of the tokens
        before the newest one, from the cache."""
        array = None if routes is None else routes.cpu().numpy().copy()
        return EngineResult(
            self.request.request_id, tuple(self.tokens), tuple(self.logprobs), reason, phases, array
        )


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The inputs of one decode step of n rows, on the device, except the tokens.

    ``positions``: int64 [n, 1]. ``cells``: int64 [n], the cells of the cache for the new keys and values. ``mask``:
    [n, 1, 1, columns] of the model's dtype, added to the attention scores. ``points``: float64 [n, 1], uniform random
    numbers in [0, 1).
    """

    positions: Tensor
    cells: Tensor
    mask: Tensor
    points: Tensor


def sampling_of(requests: Sequence[EngineRequest], device: torch.device) -> Sampling:
    """The temperatures and truncations of ``requests``, in their order, as tensors on ``device``."""
    temperatures = [request.temperature for request in requests]
    return Sampling.of(temperatures, device, [request.truncation for request in requests])


class DecodePlan:
    """At most ``PLAN_STEPS`` steps of ``rows``; no row reaches its ``max_new_tokens`` before the last step."""

    def __init__(
        self,
        rows: Sequence[ActiveSequence],
        cache: SlotCache,
        dtype: torch.dtype,
        device: torch.device,
        first: int = 0,
    ) -> None:
        """``first``: the row of the cache that ``rows`` begin at."""
        self._rows = rows
        self._first = first
        self._steps = min(PLAN_STEPS, *(row.steps_left for row in rows))
        positions = np.array([row.position for row in rows])
        columns = round_up(int(positions.max()) + self._steps)
        row_columns = cache.decode(len(rows), columns, first)
        self._decode_steps = self._prepare(positions, columns, row_columns, dtype, device)
        self.inputs = torch.tensor([row.tokens[-1:] for row in rows], device=device)  # int64 [n, 1]
        self.sampling = sampling_of([row.request for row in rows], device)
        self._tokens: list[list[int]] = []
        self._logprobs: list[list[float]] = []

    def _prepare(
        self,
        first: NDArray[np.int64],
        columns: int,
        row_columns: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[DecodeStep]:
        """``first``: int64 [n], the positions of the first step; ``row_columns``: cells between two rows."""
        n = len(first)
        steps = np.arange(self._steps)[:, None]
        counts = np.array([row.stream_index for row in self._rows])
        points = uniforms(np.array([row.key for row in self._rows]), counts + steps)
        positions = torch.from_numpy(first + steps).to(device)  # [steps, n]
        cells = positions + torch.arange(self._first, self._first + n, device=device) * row_columns
        mask = torch.zeros(self._steps, n, columns, dtype=dtype, device=device)
        mask.masked_fill_(torch.arange(columns, device=device) > positions.unsqueeze(2), -torch.inf)
        return [
            DecodeStep(*tensors)
            for tensors in zip(
                positions.unsqueeze(2).unbind(),
                cells.unbind(),
                mask.view(-1, n, 1, 1, columns).unbind(),
                torch.from_numpy(points).to(device).unsqueeze(2).unbind(),
                strict=True,
            )
        ]

    @property
    def next_step(self) -> DecodeStep:
        """The inputs of the step that is to be computed next. Raises IndexError if the plan ``is_over``."""
        return self._decode_steps[len(self._tokens)]

    @property
    def is_over(self) -> bool:
        """True once the tokens of all steps are recorded: then ``finish`` is due."""
        return len(self._tokens) == self._steps

    def record(self, inputs: Tensor, tokens: list[int], logprobs: list[float]) -> None:
        """Adds the tokens sampled by ``next_step``; ``inputs``: the same tokens on the device, int64 [n, 1]."""
        self.inputs = inputs
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)

    def tokens_of(self, row: int, start: int) -> list[int]:
        """The sampled tokens of row number ``row``, from step ``start`` on."""
        return [tokens[row] for tokens in self._tokens[start:]]

    def finish(self) -> None:
        """Appends the sampled tokens to their rows."""
        if self._tokens:
            tokens, logprobs = zip(*self._tokens, strict=True), zip(*self._logprobs, strict=True)
            for row, row_tokens, row_logprobs in zip(self._rows, tokens, logprobs, strict=True):
                row.tokens.extend(row_tokens)
                row.logprobs.extend(row_logprobs)


def new_tokens(
    rows: Sequence[ActiveSequence], plan: DecodePlan | None, token_counts: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """The tokens of ``rows``, and of ``plan`` over them, beyond ``token_counts``: see ``StepEngine.new_tokens``."""
    tokens_by_request = {}
    for number, row in enumerate(rows):
        start = token_counts.get(row.request.request_id)
        if start is None:
            continue
        tokens = row.tokens[start:]
        if plan is not None:  # it has the newest ones
            tokens += plan.tokens_of(number, max(0, start - len(row.tokens)))
        if tokens:
            tokens_by_request[row.request.request_id] = tuple(tokens)
    return tokens_by_request
