"""The soft punishment and the filter of overlong answers on a small task without a model, beside DAPO without them.

There are 16 queries. An answer has up to 16 tokens, of 20 and one that ends it. It is right if a hidden token of its
query is among them: so a longer answer is right more often at first, and the reward says nothing against an answer
that never ends. The policy is a table of scores for each query and place, whose answers are cut off in nearly half of
all cases at first. A step draws 8 queries of 8 answers and takes four Adam updates over them. Estimator, loss, sums,
divisor, punishment and filter are those of a run. The arms:

    plain    DAPO's objective alone
    buffer   ``overlong_buffer: 8``: from the ninth token on an answer costs reward, up to 1 at the last place
    filter   ``rollout.filters: [overlong]``: answers that are cut off are not trained

and the keys, each with the name of its arm before it, the mean over the seeds:

    answers     until the probability of a right answer, the mean over all queries, was first ``target``
    length      the expected number of tokens then; ``truncated``: the share of answers that are cut off then
    success, last_length, last_truncated   the same three after ``steps`` steps
    rounds      every seed's

Probabilities and lengths are those of the table, without a draw. An arm that does not reach the target counts with all
of its answers, and with its last lengths. Also: ``versions``, ``settings``. A result depends on the seed alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from random import Random
from statistics import fmean
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.filters.group_filter import GroupFilter
from flexmarl.actors.filters.overlong import Overlong
from flexmarl.actors.rollout.overlong import overlong_punishment
from flexmarl.actors.trainer.objective.loss import token_logprobs
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.results import result_of

from .score_update import TrainedAnswers, kept_answers, update_scores

_QUERIES, _TOKENS, _PLACES, _GROUP, _GROUPS, _BUFFER = 16, 20, 16, 8, 8, 8
_END: Final = _TOKENS
"""The token that ends an answer."""
ARMS: Final = ("plain", "buffer", "filter")


@dataclass(frozen=True, slots=True)
class Options:
    """``rounds``: seeds, from ``seed`` on. ``lr``: of Adam."""

    rounds: int = 3
    seed: int = 0
    steps: int = 150
    updates: int = 4
    lr: float = 0.05
    target: float = 0.9


@dataclass(frozen=True, slots=True)
class Learned:
    """``answers``: until the target; ``length``, ``truncated`` then. The others: after all steps."""

    answers: float
    length: float
    truncated: float
    success: float
    last_length: float
    last_truncated: float


@dataclass(frozen=True, slots=True)
class _Answers:
    """Answers ``[R]`` as one row of tokens: ``queries``, ``places``, ``tokens`` ``[N]``; of each answer ``lengths``,
    ``rewards`` and ``advantages`` ``[R]``."""

    queries: Tensor
    places: Tensor
    tokens: Tensor
    lengths: Tensor
    rewards: Tensor
    advantages: Tensor


class _Learner:
    """A policy and its task, from nothing."""

    def __init__(self, arm: str, options: Options, seed: int) -> None:
        self._options = options
        self._buffer = _BUFFER if arm == "buffer" else 0
        self._filters = [GroupFilter("overlong", Overlong().judge)] if arm == "filter" else []
        self._credit = CreditConfig(name="dapo")
        self._random = torch.Generator().manual_seed(seed)
        hidden = Random(f"{seed} answers")
        self._hidden = torch.tensor([hidden.randrange(_TOKENS) for _ in range(_QUERIES)])
        self._scores = torch.zeros(_QUERIES, _PLACES, _TOKENS + 1, dtype=torch.float64, requires_grad=True)
        self._optimizer = torch.optim.Adam([self._scores], lr=options.lr)

    def learn(self) -> Learned:
        reached: tuple[float, float, float] | None = None
        for step in range(1, self._options.steps + 1):
            groups = [self._group() for _ in range(_GROUPS)]
            self._update([group for group in groups if len(group.lengths)])
            success, length, truncated = self.figures()
            if reached is None and success >= self._options.target:
                reached = step * _GROUPS * _GROUP, length, truncated
        answers, *then = reached or (self._options.steps * _GROUPS * _GROUP, length, truncated)
        return Learned(answers, then[0], then[1], success, length, truncated)

    def figures(self) -> tuple[float, float, float]:
        """The probability that an answer is right, its expected tokens, and the probability that it is cut off: the
        means over the queries."""
        chances = self._scores.detach().softmax(-1)
        ends = chances[:, :, _END]
        hits = chances[torch.arange(_QUERIES), :, self._hidden]
        # Before each place: not ended, and neither ended nor right.
        alive = torch.cumprod(1 - ends, 1)
        begun = torch.cat([torch.ones(_QUERIES, 1, dtype=alive.dtype), alive[:, :-1]], 1)
        open_ = torch.cumprod(1 - ends - hits, 1)
        open_begun = torch.cat([torch.ones(_QUERIES, 1, dtype=alive.dtype), open_[:, :-1]], 1)
        right = (open_begun * hits).sum(1)
        return float(right.mean()), float(begun.sum(1).mean()), float(alive[:, -1].mean())

    def _group(self) -> _Answers:
        """The answers to a query that are trained."""
        query = int(torch.randint(_QUERIES, (), generator=self._random))
        chances = self._scores[query].detach().softmax(-1)
        drawn = torch.multinomial(chances, _GROUP, replacement=True, generator=self._random).T
        answers = [_cut(answer) for answer in drawn.tolist()]
        right = [float(int(self._hidden[query]) in answer) for answer in answers]
        rewards = [
            reward + overlong_punishment(len(answer), _PLACES, self._buffer)
            for reward, answer in zip(right, answers, strict=True)
        ]
        advantages = list(self._credit.estimator(rewards))
        cut_off = [answer[-1] != _END for answer in answers]
        kept = kept_answers(self._filters, answers, right, advantages, cut_off)
        tokens = [token for number in kept for token in answers[number]]
        return _Answers(
            torch.full((len(tokens),), query),
            torch.tensor(
                [place for number in kept for place in range(len(answers[number]))], dtype=torch.int64
            ),
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor([len(answers[number]) for number in kept], dtype=torch.int64),
            torch.tensor([rewards[number] for number in kept], dtype=torch.float64),
            torch.tensor([advantages[number] for number in kept], dtype=torch.float64),
        )

    def _update(self, groups: list[_Answers]) -> None:
        if not groups:
            return
        batch = _Answers(
            *(torch.cat([getattr(group, column.name) for group in groups]) for column in fields(_Answers))
        )
        answers = TrainedAnswers(batch.lengths, batch.advantages, batch.rewards, _GROUP)
        logprobs = partial(self._logprobs, batch)
        update_scores(self._optimizer, logprobs, answers, self._credit, self._options.updates)

    def _logprobs(self, batch: _Answers) -> Tensor:
        return token_logprobs(self._scores[batch.queries, batch.places], batch.tokens)


def _cut(answer: list[int]) -> list[int]:
    """The tokens up to the first end, which is one of them."""
    return answer[: answer.index(_END) + 1] if _END in answer else answer


def learn(arm: str, options: Options, seed: int) -> Learned:
    """Trains a policy from nothing."""
    return _Learner(arm, options, seed).learn()


def of_rounds(seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    """The measurement of ``rounds`` seeds from ``seed`` on; ``quick``: of fewer steps."""
    options = Options(seed=seed, rounds=rounds)
    return partial(measure, replace(options, steps=10) if quick else options)


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    rounds: list[dict[str, float]] = []
    for seed in range(options.seed, options.seed + options.rounds):
        line: dict[str, float] = {"seed": seed}
        report(f"seed {seed}")
        for arm in ARMS:
            line |= {f"{arm}_{key}": value for key, value in asdict(learn(arm, options, seed)).items()}
        rounds.append(line)
    means = {key: fmean(line[key] for line in rounds) for key in rounds[0] if key != "seed"}
    lines = [{key: rounded(value) for key, value in line.items()} for line in rounds]
    return result_of(options, means, rounds=lines)


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as a table."""
    table = Table(
        "seed",
        "arm",
        "answers",
        "length",
        "cut off",
        "right",
        "length",
        "cut off",
        title="at the target, in the end",
    )
    for line in result["rounds"]:
        for arm in ARMS:
            of_arm = {key.removeprefix(f"{arm}_"): value for key, value in line.items()}
            table.add_row(
                f"{line['seed']:g}", arm, f"{of_arm['answers']:.0f}", f"{of_arm['length']:.1f}",
                f"{of_arm['truncated']:.3f}", f"{of_arm['success']:.3f}", f"{of_arm['last_length']:.1f}",
                f"{of_arm['last_truncated']:.3f}",
            )  # fmt: skip
    console.print(table)
