"""The rewards that a turn's reward is compared with. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...messages import Grouping, Sample
from ...names import AgentName
from ...sample_id import SampleId


def grouped(samples: Sequence[Sample], grouping: Mapping[AgentName, Grouping]) -> list[Sample]:
    """``samples`` in their order, each with ``group_rewards`` by its agent's ``grouping``.

    - ``trajectory``: unchanged, one reward per surviving trajectory in which the agent has one.
    - ``agent_turns``: one per *turn* of the agent in the group (Dr.MAS, Feng et al., arXiv 2602.08847, eq. 5: mean
      and deviation over the agent's own active steps). An agent that speaks more often weighs more.
    - ``turn``: one per trajectory that reached the turn: groups by (query, agent, turn) (AT-GRPO, Zhao et al.,
      arXiv 2510.11062, section 4.1). Each agent's turns are counted separately, in the order of the calls.

    ``samples`` are all turns of one group; an agent that ``grouping`` lacks has ``trajectory``. Raises StoreError for
    an invalid ``sample_id``.
    """
    turns = _own_turns(samples)
    groupings = [grouping.get(AgentName(sample.agent), "trajectory") for sample in samples]
    keys = [
        (sample.agent, turn if compared == "turn" else 0)
        for sample, turn, compared in zip(samples, turns, groupings, strict=True)
    ]
    rewards: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for key, sample in zip(keys, samples, strict=True):
        rewards[key].append(sample.reward)
    return [
        sample if compared == "trajectory" else replace(sample, group_rewards=tuple(rewards[key]))
        for sample, key, compared in zip(samples, keys, groupings, strict=True)
    ]


def _own_turns(samples: Sequence[Sample]) -> list[int]:
    """The number of each sample among its agent's turns in its trajectory, from 0."""
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
