"""The objectives as their papers write them, in loops and in float64: nothing of the package is used here.

Every function returns what is to be minimised, over a whole update at once. A turn is one sequence of the papers. The
ratio is that to the policy at the start of the step (``old``), and the engine's part of it a weight of its own; or it
is that to the engine's policy, without a weight.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor


@dataclass(frozen=True)
class PaperTurn:
    """``number``: of the turn in its trajectory. ``engine`` and ``reference``: log-probabilities of ``tokens``."""

    query: int
    trajectory: int
    number: int
    reward: float
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    engine: tuple[float, ...]


@dataclass(frozen=True)
class PaperStep:
    """``logprobs`` and ``reference``: ``[T]`` float64 for each turn, the former with a gradient. ``rewards``: of all
    trajectories, by query. ``beta``: of the KL. ``old``: log-probabilities at the step's start; None: those of
    ``logprobs``. ``behaviour``: the ratio is that to the engine's policy. ``whole``: the step that the turns are an
    update of, with all of its turns and as it starts; None: this is the whole step."""

    turns: Sequence[PaperTurn]
    logprobs: Sequence[Tensor]
    reference: Sequence[Tensor]
    rewards: Sequence[Sequence[float]]
    beta: float
    old: Sequence[Tensor] | None = None
    behaviour: bool = False
    whole: "PaperStep | None" = None

    @property
    def tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def start(self) -> Sequence[Tensor]:
        """The log-probabilities at the step's start, ``[T]`` for each turn."""
        return [logprobs.detach() for logprobs in self.logprobs] if self.old is None else self.old

    @property
    def denominators(self) -> list[Tensor]:
        """The logarithms of the ratio's denominator, ``[T]`` for each turn."""
        engine = [torch.tensor(turn.engine, dtype=torch.float64) for turn in self.turns]
        return engine if self.behaviour else list(self.start)

    @property
    def weights(self) -> list[list[float]]:
        """Truncated importance sampling (Yao et al., 2025): min(pi_old / pi_engine, 2), by turn and token."""
        return [
            [
                1.0 if self.behaviour else min(math.exp(old - engine), 2.0)
                for old, engine in zip(start.tolist(), turn.engine, strict=True)
            ]
            for turn, start in zip(self.turns, self.start, strict=True)
        ]


def ppo_clip(r: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """1707.06347, eq. 7."""
    return torch.minimum(r * advantage, torch.clamp(r, 1 - low, 1 + high) * advantage)


def k3(logprob: Tensor, reference: Tensor) -> Tensor:
    """2402.03300, eq. 4."""
    return torch.exp(reference - logprob) - (reference - logprob) - 1


def standardised(reward: float, group: Sequence[float]) -> float:
    """2402.03300, section 4.1.2; 1e-4 is TRL's."""
    return (reward - fmean(group)) / (stdev(group) + 1e-4) if len(group) > 1 else 0.0


def whole_trajectories(step: PaperStep, turn: PaperTurn) -> Sequence[float]:
    return step.rewards[turn.query]


def same_turns(step: PaperStep, turn: PaperTurn) -> Sequence[float]:
    """2510.11062, section 4.1: the group of (query, agent, turn)."""
    return [t.reward for t in step.turns if (t.query, t.number) == (turn.query, turn.number)]


def all_turns(step: PaperStep, turn: PaperTurn) -> Sequence[float]:
    """2602.08847, eq. 5: mean and deviation over the agent's own active steps."""
    return [t.reward for t in step.turns if t.query == turn.query]


def clipped_tokens(
    step: PaperStep, advantages: Sequence[Sequence[float]], low: float = 0.2, high: float = 0.2
) -> list[list[Tensor]]:
    """The objective of each token, by turn."""
    return [
        [
            weight * ppo_clip(torch.exp(logprob - old), advantage, low, high)
            for logprob, old, weight, advantage in zip(*each, strict=True)
        ]
        for each in zip(step.logprobs, step.denominators, step.weights, advantages, strict=True)
    ]


def group_advantages(
    step: PaperStep, group: Callable[[PaperStep, PaperTurn], Sequence[float]], scale: bool = True
) -> list[list[float]]:
    found = []
    for turn in step.turns:
        rewards = group(step, turn)
        advantage = standardised(turn.reward, rewards) if scale else turn.reward - fmean(rewards)
        found.append([advantage] * len(turn.tokens))
    return found


def less_k3(step: PaperStep, objective: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [
        [value - step.beta * k3(logprob, reference) for value, logprob, reference in zip(*each, strict=True)]
        for each in zip(objective, step.logprobs, step.reference, strict=True)
    ]


def added(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum()


def token_mean(step: PaperStep, objective: Sequence[Sequence[Tensor]]) -> Tensor:
    return -added(each for turn in objective for each in turn) / step.tokens


def grpo(step: PaperStep) -> Tensor:
    """2402.03300, eq. 3: 1/G sum_i 1/|o_i| sum_t, over all of the step's sequences."""
    objective = less_k3(step, clipped_tokens(step, group_advantages(step, whole_trajectories)))
    return -added(added(each) / len(each) for each in objective) / len(objective)


def dr_grpo(step: PaperStep, longest: int) -> Tensor:
    """2503.20783, section 3.2: no 1/|o_i|, no deviation; the divisor is a constant, the generation budget."""
    advantages = group_advantages(step, whole_trajectories, scale=False)
    objective = less_k3(step, clipped_tokens(step, advantages))
    return -added(each for turn in objective for each in turn) / (len(objective) * longest)


def dapo(step: PaperStep) -> Tensor:
    """2503.14476, eq. 8: 1 / sum_i |o_i|, clip-higher."""
    objective = clipped_tokens(step, group_advantages(step, whole_trajectories), 0.2, 0.28)
    return token_mean(step, less_k3(step, objective))


def at_grpo(step: PaperStep) -> Tensor:
    return token_mean(step, less_k3(step, clipped_tokens(step, group_advantages(step, same_turns))))


def dr_mas(step: PaperStep) -> Tensor:
    return token_mean(step, less_k3(step, clipped_tokens(step, group_advantages(step, all_turns))))


def gspo(step: PaperStep) -> Tensor:
    """2507.18071, eq. 5 and 7: the ratio (pi(y) / pi_old(y))^(1/|y|) of the whole sequence. The KL, which the paper
    omits, is GRPO's."""
    total = torch.zeros(())
    parts = zip(step.turns, step.logprobs, step.denominators, step.weights, step.reference, strict=True)
    for turn, logprobs, old, weights, reference in parts:
        advantage = standardised(turn.reward, whole_trajectories(step, turn))
        s = torch.exp((logprobs.sum() - old.sum()) / len(turn.tokens))
        total = total + fmean(weights) * ppo_clip(s, advantage, 3e-4, 4e-4)
        total = total - step.beta * k3(logprobs, reference).mean()
    return -total / len(step.turns)


def cispo(step: PaperStep) -> Tensor:
    """2506.13585, eq. 4 and 5: sg(clip(r)) A log pi, over all tokens."""
    objective = []
    for turn, *each in zip(step.turns, step.logprobs, step.denominators, step.weights, strict=True):
        advantage = standardised(turn.reward, whole_trajectories(step, turn))
        objective.append(
            [
                weight * min(torch.exp(logprob - old).item(), 5.0) * advantage * logprob
                for logprob, old, weight in zip(*each, strict=True)
            ]
        )
    return token_mean(step, less_k3(step, objective))


def rloo(step: PaperStep) -> Tensor:
    """2402.14740, eq. 1, 5 and 8: R = r - beta log(pi / pi_ref) of a trajectory, less the mean of the others."""
    returns = [list(rewards) for rewards in step.rewards]
    for turn, reference in zip(step.turns, step.reference, strict=True):
        log_ratio = sum(turn.engine) - reference.sum().item()
        returns[turn.query][turn.trajectory] -= step.beta * log_ratio
    total = torch.zeros(())
    for turn, logprobs, weights in zip(step.turns, step.logprobs, step.weights, strict=True):
        mine = returns[turn.query][turn.trajectory]
        others = [r for n, r in enumerate(returns[turn.query]) if n != turn.trajectory]
        for logprob, weight in zip(logprobs, weights, strict=True):
            total = total + weight * (mine - fmean(others)) * logprob
    return -total / len(step.turns)


def normalised(advantages: Sequence[Sequence[float]]) -> list[list[float]]:
    """2501.03262, section 3.1: over all tokens of the batch."""
    flat = [a for each in advantages for a in each]
    mean = fmean(flat)
    deviation = math.sqrt(fmean((a - mean) ** 2 for a in flat))
    return [[(a - mean) / deviation for a in each] for each in advantages]


def those_of(step: PaperStep, advantages: Sequence[list[float]]) -> list[list[float]]:
    """Returns those for the turns of ``step``, of the ``advantages`` of all turns of the whole step."""
    of_turn = dict(zip((step.whole or step).turns, advantages, strict=True))
    return [of_turn[turn] for turn in step.turns]


def reinforce_pp(step: PaperStep) -> Tensor:
    """2501.03262, section 3.1: A_t = r - beta sum_{u >= t} KL_u with k1, normalised; PPO's clip."""
    advantages, whole = [], step.whole or step
    for turn, reference in zip(whole.turns, whole.reference, strict=True):
        kl = [e - r for e, r in zip(turn.engine, reference.tolist(), strict=True)]
        advantages.append([turn.reward - step.beta * sum(kl[t:]) for t in range(len(kl))])
    return token_mean(step, clipped_tokens(step, those_of(step, normalised(advantages))))


def reinforce_pp_baseline(step: PaperStep) -> Tensor:
    """2501.03262, section 3.2: less the group's mean, normalised; k2 in the loss."""
    whole = group_advantages(step.whole or step, whole_trajectories, scale=False)
    advantages = those_of(step, normalised(whole))
    objective = [
        [
            value - step.beta * (logprob - reference) ** 2 / 2
            for value, logprob, reference in zip(*each, strict=True)
        ]
        for each in zip(clipped_tokens(step, advantages), step.logprobs, step.reference, strict=True)
    ]
    return token_mean(step, objective)


def ppo(
    step: PaperStep, values: Sequence[Tensor], old_values: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """1707.06347, eq. 7, 9 and 11, with gamma 1 and lambda 0.95, and the reward of 2203.02155, eq. 2: the loss of the
    policy and that of the critic, whose ``values`` (``[T]`` by turn) have a gradient. ``old_values``: at the step's
    start, of which advantages and returns are made; None: ``values``."""
    advantages, squares = [], torch.zeros(())
    at_start = old_values or values
    for turn, reference, value, old in zip(step.turns, step.reference, values, at_start, strict=True):
        v = [*old.tolist(), 0.0]
        length = len(turn.tokens)
        rewards = [-step.beta * (turn.engine[t] - reference[t].item()) for t in range(length)]
        rewards[-1] += turn.reward
        deltas = [rewards[t] + v[t + 1] - v[t] for t in range(length)]
        advantages.append([sum(0.95 ** (u - t) * deltas[u] for u in range(t, length)) for t in range(length)])
        for t in range(length):
            squares = squares + (value[t] - (advantages[-1][t] + v[t])) ** 2 / 2
    return token_mean(step, clipped_tokens(step, advantages)), squares / step.tokens


def rae(step: PaperStep) -> Tensor:
    """2506.24119, section 3.3: (R - b) log pi, summed over a turn; b of a role is 0 in the first step."""
    total = torch.zeros(())
    for turn, *each in zip(step.turns, step.logprobs, step.weights, step.reference, strict=True):
        for logprob, weight, other in zip(*each, strict=True):
            total = total + weight * turn.reward * logprob - step.beta * k3(logprob, other)
    return -total / len(step.turns)


def echo(step: PaperStep) -> Tensor:
    """2602.02150: eps = 0.05 + 0.15 sigmoid(4 (1 - C_tail)), over a tail of 16 tokens; the confidence of a token is its
    probability under the old policy."""
    objective = []
    parts = zip(step.turns, step.logprobs, step.denominators, step.weights, strict=True)
    for turn, logprobs, olds, weights in parts:
        advantage = standardised(turn.reward, whole_trajectories(step, turn))
        tokens: list[Tensor] = []
        for t, (logprob, old, weight) in enumerate(zip(logprobs, olds, weights, strict=True)):
            tail = fmean(math.exp(value) for value in olds.tolist()[max(0, t - 15) : t + 1])
            eps = 0.05 + 0.15 / (1 + math.exp(-4 * (1 - tail)))
            tokens.append(weight * ppo_clip(torch.exp(logprob - old), advantage, eps, eps))
        objective.append(tokens)
    return token_mean(step, less_k3(step, objective))


def sa_gcpo(step: PaperStep) -> Tensor:
    """OxygenREC, eq. 4 to 9: 1/G sum_i 1/|o_i| sum_t (4 / tau) sigmoid(tau (r - 1)) A, without positive advantages of
    rewards below 0.5."""
    objective = []
    for turn, *each in zip(step.turns, step.logprobs, step.denominators, step.weights, strict=True):
        advantage = standardised(turn.reward, whole_trajectories(step, turn))
        if advantage > 0 and turn.reward < 0.5:
            advantage = 0.0
        tau = 2.0 if advantage > 0 else 5.0
        objective.append(
            [
                weight * advantage * 4 / tau / (1 + torch.exp(-tau * (torch.exp(logprob - old) - 1)))
                for logprob, old, weight in zip(*each, strict=True)
            ]
        )
    objective = less_k3(step, objective)
    return -added(added(each) / len(each) for each in objective) / len(objective)


def habc(step: PaperStep) -> Tensor:
    """2606.17043: min(exp(A), 5) log pi, with A = (1 - g) A_viability + g A_efficiency."""
    objective = []
    for turn, logprobs, weights in zip(step.turns, step.logprobs, step.weights, strict=True):
        group = whole_trajectories(step, turn)
        p = fmean(min(reward, 1) for reward in group)
        g = 1 / (1 + math.exp(-(min(max(p, 0), 1) - 0.5) / 0.1))
        viability, efficiency = min(turn.reward, 1) - p, 0.0
        if turn.reward >= 1:
            efficiency = turn.reward - fmean(reward for reward in group if reward >= 1)
        advantage = 0.0 if len(set(group)) == 1 else (1 - g) * viability + g * efficiency
        weight = min(math.exp(advantage), 5.0)
        objective.append([w * weight * logprob for w, logprob in zip(weights, logprobs, strict=True)])
    return token_mean(step, less_k3(step, objective))


def mnpo(step: PaperStep) -> Tensor:
    """2509.23102, eq. 16 for one answer at a time: ``(h - A / eta)^2``, with ``eta`` 1 and half of its weight; ``A`` is
    the expected win of eq. 8 over the other answers, less 1/2, and the opponents are the policy at the step's start."""
    losses = []
    for turn, logprobs, old, weights in zip(
        step.turns, step.logprobs, step.denominators, step.weights, strict=True
    ):
        group = step.rewards[turn.query]
        others = [*group]
        others.remove(turn.reward)
        wins = [1.0 if turn.reward > other else 0.5 if turn.reward == other else 0.0 for other in others]
        advantage = fmean(wins) - 0.5 if wins and len({*group}) > 1 else 0.0
        loss = 0.5 * ((logprobs - old).sum() - advantage) ** 2
        losses.append(loss * fmean(weights))
    kl = [
        step.beta * k3(logprob, reference)
        for each in zip(step.logprobs, step.reference, strict=True)
        for logprob, reference in zip(*each, strict=True)
    ]
    return (added(losses) + added(kl)) / len(step.turns)
