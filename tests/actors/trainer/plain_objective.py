"""Every algorithm's formula, written out in loops."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from flexmarl.actors.messages import Sample

from .algorithm import Algorithm


@dataclass(frozen=True)
class Row:
    """A sample, and the figures of trainer, reference and critic for its tokens. ``group_rewards``: of all trajectories
    of its group, in their order."""

    sample: Sample
    group_rewards: tuple[float, ...]
    logprobs: tuple[float, ...]
    reference: tuple[float, ...]
    values: tuple[float, ...]


# --------------------------------------------------------------------------- the reference, in loops


def plain_kl(config: Algorithm, ours: Any, theirs: float) -> Any:
    d = ours - theirs
    exp = torch.exp if isinstance(d, Tensor) else math.exp
    return {"k1": d, "k2": d * d / 2, "k3": exp(-d) - 1 + d}[config.loss.kl_estimator]


def plain_group(config: Algorithm, row: Row, rows: Sequence[Row]) -> list[float]:
    mine, name = row.sample, config.loss.name
    same = [r.sample for r in rows if r.sample.group == mine.group]
    if name == "dr_mas" or (name != "at_grpo" and config.credit.rewards == "both"):
        return [s.reward for s in same]
    if name == "at_grpo":  # one agent that takes its turns in order: the number in the id is its own
        return [s.reward for s in same if s.sample_id.split("_")[1] == mine.sample_id.split("_")[1]]
    return list(row.group_rewards)


def plain_advantages(config: Algorithm, rows: Sequence[Row]) -> list[list[float]]:
    """Advantages per row and token, written as in the papers."""
    beta = config.loss.kl_coefficient if config.loss.kl_in_reward else 0.0
    kls = [
        [beta * plain_kl(config, a, b) for a, b in zip(row.sample.logprobs, row.reference, strict=True)]
        for row in rows
    ]
    found: list[list[float]] = []
    for n, row in enumerate(rows):
        rewards, reward = plain_group(config, row, rows), row.sample.reward
        if config.loss.name == "rloo":
            advantage = (reward - fmean(rewards)) * len(rewards) / (len(rewards) - 1)
            # Every turn has its own reward, which holds its KL.
            if config.credit.rewards == "both":
                others = [
                    sum(kls[m]) for m, r in enumerate(rows) if r.sample.group == row.sample.group and m != n
                ]
                found.append([advantage - (sum(kls[n]) - fmean(others))] * len(row.logprobs))
                continue
            spent = [0.0] * len(rewards)  # by trajectory, over all of its turns
            for other, each in zip(rows, kls, strict=True):
                if other.sample.group == row.sample.group:
                    spent[int(other.sample.sample_id.split("_")[2])] += sum(each)
            mine = spent.pop(int(row.sample.sample_id.split("_")[2]))
            found.append([advantage - (mine - fmean(spent))] * len(row.logprobs))
        elif config.loss.name == "rae":  # the mean of the role is 0 in the first step
            found.append([reward] * len(row.logprobs))
        elif config.loss.name == "reinforce_pp":
            found.append([reward - sum(kls[n][t:]) for t in range(len(row.logprobs))])
        elif config.loss.critic is not None:
            found.append(plain_gae(config, row, [-kl for kl in kls[n]]))
        else:
            advantage = reward - fmean(rewards)
            if config.credit.scale_rewards:
                advantage /= (stdev(rewards) if len(rewards) > 1 else 0.0) + 1e-4
            found.append([advantage] * len(row.logprobs))
    if config.loss.name.startswith("reinforce_pp"):
        flat = [a for each in found for a in each]
        mean = fmean(flat)
        spread = math.sqrt(max(fmean((a - mean) ** 2 for a in flat), 1e-8))
        found = [[(a - mean) / spread for a in each] for each in found]
    return found


def plain_gae(config: Algorithm, row: Row, rewards: list[float]) -> list[float]:
    """The sum of eq. 16 as it is written, over the rest of the turn."""
    assert config.loss.critic is not None
    gamma, lam = config.loss.critic.gamma, config.loss.critic.lam
    rewards = [*rewards[:-1], rewards[-1] + row.sample.reward]
    after = [*row.values[1:], 0.0]
    deltas = [r + gamma * later - v for r, later, v in zip(rewards, after, row.values, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


def plain_token_loss(config: Algorithm, logprob: Tensor, old: Any, advantage: float) -> Tensor:
    low, high = 1 - config.loss.clip_low, 1 + config.loss.clip_high
    if config.loss.name in ("rloo", "rae"):
        return -advantage * logprob
    ratio = torch.exp(logprob - old)
    if config.loss.name == "cispo":
        return -min(max(ratio.item(), low), high) * advantage * logprob
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def plain_weight(config: Algorithm, gap: float) -> float:
    weight, low, high = math.exp(gap), config.loss.correction_low, config.loss.correction_high
    if config.loss.correction == "none":
        return 1.0
    if config.loss.correction == "tis":
        assert high is not None
        return min(weight, high)
    return 0.0 if (low is not None and weight < low) or (high is not None and weight > high) else weight


def plain_loss(config: Algorithm, rows: Sequence[Row], logprobs: list[list[Tensor]]) -> Tensor:
    """The mean loss of a whole step."""
    advantages = plain_advantages(config, rows)
    total = torch.zeros((), dtype=torch.float64)
    for row, ours, advantage in zip(rows, logprobs, advantages, strict=True):
        engine = row.sample.logprobs
        old = [lp.item() for lp in ours]
        sequence = torch.zeros((), dtype=torch.float64)
        mean_gap = sum((a - b for a, b in zip(ours, old, strict=True)), torch.zeros(())) / len(ours)
        for t, logprob in enumerate(ours):
            weight = plain_weight(config, logprob.item() - engine[t])
            if config.loss.name == "gspo":
                loss = plain_token_loss(config, mean_gap, 0.0, advantage[t])
            else:
                loss = plain_token_loss(config, logprob, old[t], advantage[t])
            sequence = sequence + weight * loss
            if config.loss.kl_coefficient and not config.loss.kl_in_reward:
                sequence = sequence + config.loss.kl_coefficient * plain_kl(config, logprob, row.reference[t])
        total = total + (sequence / len(ours) if config.loss.aggregation == "sequence_mean" else sequence)
    tokens = sum(len(row.logprobs) for row in rows)
    return (
        total
        / {
            "token_mean": tokens,
            "sequence_mean": len(rows),
            "sequence_sum": len(rows),
            "constant": len(rows) * (config.loss.constant_length or 0),
        }[config.loss.aggregation]
    )


# --------------------------------------------------------------------------- the trainer's functions


def tokens(rows: Sequence[Row], of: Callable[[Row], Sequence[float]]) -> Tensor:
    return torch.tensor([each for row in rows for each in of(row)], dtype=torch.float64)
