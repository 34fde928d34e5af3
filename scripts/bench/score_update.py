"""The updates of a policy that is a table of scores, with the loss, the sums and the divisor of a run's algorithm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.filters.group_filter import FinishedGroup, FinishedTurn, GroupFilter, apply_filters
from flexmarl.actors.messages import Query
from flexmarl.actors.names import AgentName
from flexmarl.actors.trainer.objective.loss import by_token, denominator, sum_tokens
from flexmarl.actors.trainer.objective.loss_inputs import LossInputs
from flexmarl.actors.trainer.objective.token_losses import token_loss_of

_AGENT: Final = AgentName("solver")


@dataclass(frozen=True, slots=True)
class TrainedAnswers:
    """The ``lengths`` in tokens, ``advantages`` and ``rewards`` of answers, ``[R]`` each. ``group``: rewards that each
    was compared with."""

    lengths: Tensor
    advantages: Tensor
    rewards: Tensor
    group: int


def update_scores(
    optimizer: torch.optim.Optimizer,
    logprobs: Callable[[], Tensor],
    answers: TrainedAnswers,
    credit: CreditConfig,
    updates: int,
) -> None:
    """Takes optimizer steps over a batch. ``logprobs``: returns those of all tokens of the answers ``[N]`` under the
    scores as they are, with the gradient; the first ones are the old policy's."""
    row, lengths = credit.row, answers.lengths
    old = logprobs().detach()
    for _ in range(updates):
        inputs = LossInputs(
            logprobs(),
            old,
            old,
            by_token(answers.advantages, lengths, len(old)),
            lengths,
            torch.full_like(lengths, answers.group),
            answers.rewards,
            clip_low=row.clip_low,
            clip_high=row.clip_high,
            options=dict(row.options),
        )
        values = token_loss_of(row.surrogate)(inputs).values
        divisor = denominator(row.aggregation, tokens=len(values), sequences=len(lengths), constant=None)
        optimizer.zero_grad()
        (sum_tokens(values, lengths, row.aggregation) / divisor).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def kept_answers(
    filters: Sequence[GroupFilter],
    answers: Sequence[Sequence[int]],
    rewards: Sequence[float],
    advantages: Sequence[float],
    truncated: Sequence[bool],
) -> list[int]:
    """Returns the places of the answers to one query that the filters leave. ``answers``: tokens. ``truncated``: they
    have no end. All of one length."""
    turns = tuple(
        FinishedTurn(
            str(place), _AGENT, place, (0,), tuple(answers[place]), "", truncated[place], reward, advantage
        )
        for place, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True))
    )
    group = FinishedGroup(Query("q", ""), turns, {_AGENT: list(rewards)}, {})
    return [int(turn.sample_id) for turn in apply_filters(group, filters)[0].turns]
