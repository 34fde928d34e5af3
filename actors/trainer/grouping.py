"""Whose rewards a turn's reward is compared with."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ..messages import Sample
from .algorithms import Grouping


def regrouped(samples: Sequence[Sample], grouping: Grouping) -> list[Sample]:
    """``samples`` in their order, each with the ``group_rewards`` that ``grouping`` means.

    - ``trajectory``: as they are, one reward per surviving trajectory in which the agent has one.
    - ``agent_turns``: one per *turn* of the agent in the group (Dr.MAS, Feng et al., arXiv 2602.08847, eq. 5: mean
      and deviation over the agent's own active steps). An agent that speaks more often weighs more.
    - ``turn``: one per trajectory that reached the turn: groups by (query, agent, turn) (AT-GRPO, Zhao et al.,
      arXiv 2510.11062, section 4.1). An agent's turns are counted by themselves, in the order they were asked for.

    ``samples`` must hold all turns of every group they touch. Raises ``ValueError`` for a ``sample_id`` that does not
    end in ``_{turn}_{trajectory}``.
    """
    if grouping == "trajectory":
        return list(samples)
    if grouping == "agent_turns":
        keys: list[tuple[str | int, ...]] = [(sample.group, sample.agent) for sample in samples]
    else:
        keys = [(s.group, s.agent, turn) for s, turn in zip(samples, _own_turns(samples), strict=True)]
    rewards: defaultdict[tuple[str | int, ...], list[float]] = defaultdict(list)
    for key, sample in zip(keys, samples, strict=True):
        rewards[key].append(sample.reward)
    return [replace(s, group_rewards=tuple(rewards[key])) for key, s in zip(keys, samples, strict=True)]


def _own_turns(samples: Sequence[Sample]) -> list[int]:
    """Which turn of its agent in its trajectory each sample is, from 0."""
    names = [_turn_and_trajectory(sample.sample_id) for sample in samples]
    turns: defaultdict[tuple[str, str, int], list[int]] = defaultdict(list)
    for sample, (turn, trajectory) in zip(samples, names, strict=True):
        turns[sample.group, sample.agent, trajectory].append(turn)
    for taken in turns.values():
        taken.sort()
    return [
        turns[sample.group, sample.agent, trajectory].index(turn)
        for sample, (turn, trajectory) in zip(samples, names, strict=True)
    ]


def _turn_and_trajectory(sample_id: str) -> tuple[int, int]:
    try:
        _, turn, trajectory = sample_id.rsplit("_", 2)
        return int(turn), int(trajectory)
    except ValueError:
        raise ValueError(f"sample id {sample_id!r} does not end in _<turn>_<trajectory>") from None
