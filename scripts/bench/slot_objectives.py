"""The slots of losses and filters on a small task without a model: the answers that they need, beside GRPO without.

There are 16 queries, and an answer is three of five tokens. One answer is worth 1.5 and another one 1; any other has a
sixth for each token at the best one's place. So a group may be bad as a whole, its best is often the second answer, and
most rewards of a trained policy are equal. The policy is a table of scores for each query and place. A step draws 8
queries of 8 answers and takes eight Adam updates over them, so that ratios leave a clip's range. Estimators, losses,
their sums and divisors, and filters are those of a run; a group that a filter drops is replaced, as with
``replacement_queries``. The keys:

    plain_answers, answers   until the expected reward over all queries was first ``target``, with ``grpo`` and the slot
    plain_reward, reward     the expected reward after ``steps`` steps, 1.5 at most
    ratio         the second of the first pair over the first, each of them the mean over the seeds
    step_ratio    the same of the steps until then; ``trained_ratio``: of the answers that were trained
    rounds        every seed's

A run that does not reach the target counts with all of its answers. Also: ``versions``, ``settings``. A result depends
on the seed alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import fmean
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.filters.contrast import Contrast
from flexmarl.actors.filters.equal_rewards import EqualRewards
from flexmarl.actors.filters.group_filter import (
    FilterOptions,
    GroupFilter,
)
from flexmarl.actors.filters.near_duplicate import NearDuplicate
from flexmarl.actors.trainer.objective.loss import token_logprobs
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.results import result_of

from .score_update import TrainedAnswers, kept_answers, update_scores

_QUERIES, _TOKENS, _PLACES, _GROUP, _GROUPS = 16, 5, 3, 8, 8
_MOST_DRAWS: Final = 4 * _GROUPS


@dataclass(frozen=True, slots=True)
class Arm:
    """An algorithm with its filter."""

    algorithm: str = "grpo"
    group_filter: FilterOptions | None = None


ARMS: Final[Mapping[str, Arm]] = {
    **{f"loss_{name}": Arm(name) for name in ("echo", "sa_gcpo", "habc", "mnpo")},
    "filter_equal_rewards": Arm(group_filter=EqualRewards()),
    "filter_near_duplicate": Arm(group_filter=NearDuplicate(similarity=1.0)),
    "filter_contrast": Arm(group_filter=Contrast(extremes=2)),
}


@dataclass(frozen=True, slots=True)
class Options:
    """``rounds``: seeds, from ``seed`` on. ``lr``: of Adam."""

    name: str
    rounds: int = 3
    seed: int = 0
    steps: int = 60
    updates: int = 8
    lr: float = 0.05
    target: float = 1.2


@dataclass(frozen=True, slots=True)
class Learned:
    """``answers``, ``trained`` ones among them, and ``steps`` until the target. ``reward``: expected, after all."""

    answers: int
    trained: int
    steps: int
    reward: float


@dataclass(slots=True)
class _Batch:
    """Answers ``[R, 3]`` of the queries ``[R]``, their rewards ``[R]`` and advantages ``[R]``."""

    queries: Tensor
    answers: Tensor
    rewards: Tensor
    advantages: Tensor


class _Learner:
    """A policy and its task, from nothing."""

    def __init__(self, arm: Arm, options: Options, seed: int) -> None:
        self._arm, self._options = arm, options
        self._credit = CreditConfig(name=arm.algorithm)
        self._filters = [] if arm.group_filter is None else [GroupFilter("filter", arm.group_filter.judge)]
        self._random = torch.Generator().manual_seed(seed)
        self._values = _values(Random(f"{seed} answers"))
        self._scores = torch.zeros(_QUERIES, _PLACES, _TOKENS, dtype=torch.float64, requires_grad=True)
        self._optimizer = torch.optim.Adam([self._scores], lr=options.lr)
        self._drawn = self._trained = 0

    def learn(self) -> Learned:
        reached: tuple[int, int, int] | None = None
        for step in range(1, self._options.steps + 1):
            if batch := self._batch():
                self._update(batch)
            if reached is None and self.reward >= self._options.target:
                reached = self._drawn, self._trained, step
        return Learned(*(reached or (self._drawn, self._trained, self._options.steps)), self.reward)

    @property
    def reward(self) -> float:
        """The expected reward of an answer, the mean over the queries."""
        first, second, third = self._scores.detach().softmax(-1).unbind(1)
        chances = torch.einsum("qa,qb,qc->qabc", first, second, third)
        return float((chances * self._values).sum() / _QUERIES)

    def _batch(self) -> _Batch | None:
        """The groups of a step; fewer if the filter drops nearly all."""
        groups: list[_Batch] = []
        draws = 0
        while len(groups) < _GROUPS and draws < _MOST_DRAWS:
            draws += 1
            group = self._group(int(torch.randint(_QUERIES, (), generator=self._random)))
            if len(group.queries):
                groups.append(group)
        if not groups:
            return None
        columns = ("queries", "answers", "rewards", "advantages")
        return _Batch(*(torch.cat([getattr(group, column) for group in groups]) for column in columns))

    def _group(self, query: int) -> _Batch:
        """The answers to a query that are trained."""
        self._drawn += _GROUP
        chances = self._scores[query].detach().softmax(-1)
        answers = torch.multinomial(chances, _GROUP, replacement=True, generator=self._random).T
        rewards = self._values[query, answers[:, 0], answers[:, 1], answers[:, 2]]
        advantages = self._credit.estimator(rewards.tolist())
        kept = kept_answers(self._filters, answers.tolist(), rewards.tolist(), advantages, [False] * _GROUP)
        credited = torch.tensor(advantages, dtype=torch.float64)
        return _Batch(torch.full((len(kept),), query), answers[kept], rewards[kept], credited[kept])

    def _update(self, batch: _Batch) -> None:
        count = len(batch.queries)
        self._trained += count
        answers = TrainedAnswers(torch.full((count,), _PLACES), batch.advantages, batch.rewards, _GROUP)
        logprobs = partial(self._logprobs, batch)
        update_scores(self._optimizer, logprobs, answers, self._credit, self._options.updates)

    def _logprobs(self, batch: _Batch) -> Tensor:
        scores = self._scores[batch.queries].reshape(-1, _TOKENS)
        return token_logprobs(scores, batch.answers.reshape(-1))


def _values(random: Random) -> Tensor:
    """The reward of each answer to each query: ``[16, 5, 5, 5]``."""
    values = torch.zeros(_QUERIES, _TOKENS, _TOKENS, _TOKENS, dtype=torch.float64)
    for query in range(_QUERIES):
        best = [random.randrange(_TOKENS) for _ in range(_PLACES)]
        second = [(token + random.randrange(1, _TOKENS)) % _TOKENS for token in best]
        for place, token in enumerate(best):
            values[query].select(place, token).add_(1 / 6)
        values[query][tuple(second)], values[query][tuple(best)] = 1.0, 1.5
    return values


def learn(arm: Arm, options: Options, seed: int) -> Learned:
    """Trains a policy from nothing."""
    return _Learner(arm, options, seed).learn()


def of_rounds(name: str, seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    """The measurement of ``rounds`` seeds from ``seed`` on; ``quick``: of fewer steps."""
    options = Options(name, seed=seed, rounds=rounds)
    return partial(measure, replace(options, steps=10) if quick else options)


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    rounds = []
    for seed in range(options.seed, options.seed + options.rounds):
        report(f"seed {seed}")
        plain, slot = learn(Arm(), options, seed), learn(ARMS[options.name], options, seed)
        rounds.append(
            {
                "seed": seed,
                "plain_answers": plain.answers,
                "answers": slot.answers,
                "plain_trained": plain.trained,
                "trained": slot.trained,
                "plain_steps": plain.steps,
                "steps": slot.steps,
                "plain_reward": plain.reward,
                "reward": slot.reward,
            }
        )
    figures = {key: fmean(line[key] for line in rounds) for key in rounds[0] if key != "seed"}
    figures["ratio"] = figures["answers"] / figures["plain_answers"]
    figures["trained_ratio"] = figures["trained"] / figures["plain_trained"]
    figures["step_ratio"] = figures["steps"] / figures["plain_steps"]
    lines = [{key: rounded(value) for key, value in line.items()} for line in rounds]
    return result_of(options, figures, rounds=lines)


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as a table."""
    table = Table(
        "seed", "GRPO", "slot", "ratio", "steps", "reward in the end", title="answers to the target"
    )
    for line in result["rounds"]:
        table.add_row(
            str(line["seed"]),
            f"{line['plain_answers']:.0f}",
            f"{line['answers']:.0f}",
            f"{line['answers'] / line['plain_answers']:.2f}",
            f"{line['plain_steps']:.0f}, {line['steps']:.0f}",
            f"{line['plain_reward']:.2f}, {line['reward']:.2f}",
        )
    console.print(table)
