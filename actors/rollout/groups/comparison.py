"""Whose rewards a turn's reward is compared with. Pure: the samples of a group that closes in, the same out."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...messages import Grouping, Sample
from ...sample_id import SampleId


def grouped(samples: Sequence[Sample], grouping: Mapping[str, Grouping]) -> list[Sample]:
    """``samples`` in their order, each with the ``group_rewards`` that its agent's ``grouping`` means.

    - ``trajectory``: as they are, one reward per surviving trajectory in which the agent has one.
    - ``agent_turns``: one per *turn* of the agent in the group (Dr.MAS, Feng et al., arXiv 2602.08847, eq. 5: mean
      and deviation over the agent's own active steps). An agent that speaks more often weighs more.
    - ``turn``: one per trajectory that reached the turn: groups by (query, agent, turn) (AT-GRPO, Zhao et al.,
      arXiv 2510.11062, section 4.1). An agent's turns are counted by themselves, in the order they were asked for.

    ``samples`` are all turns of one group; an agent that ``grouping`` lacks has ``trajectory``. Raises StoreError for a
    ``sample_id`` that is none.
    """
    turns = _own_turns(samples)
    keys = [
        (sample.agent, turn if grouping.get(sample.agent) == "turn" else 0)
        for sample, turn in zip(samples, turns, strict=True)
    ]
    rewards: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for key, sample in zip(keys, samples, strict=True):
        rewards[key].append(sample.reward)
    return [
        replace(sample, group_rewards=tuple(rewards[key]))
        if grouping.get(sample.agent, "trajectory") != "trajectory"
        else sample
        for key, sample in zip(keys, samples, strict=True)
    ]


def _own_turns(samples: Sequence[Sample]) -> list[int]:
    """Which turn of its agent in its trajectory each sample is, from 0."""
    names = [SampleId.parse(sample.sample_id) for sample in samples]
    asked: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for sample, name in zip(samples, names, strict=True):
        asked[sample.agent, name.trajectory].append(name.turn)
    for turns in asked.values():
        turns.sort()
    return [
        asked[sample.agent, name.trajectory].index(name.turn)
        for sample, name in zip(samples, names, strict=True)
    ]
