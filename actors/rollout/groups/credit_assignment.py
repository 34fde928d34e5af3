"""The rewards that a turn's reward is compared with, and the advantage that this gives. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from ...credit.credit_config import CreditConfig
from ...messages import Sample
from ...names import AgentName
from ...sample_id import SampleId
from ...trees.branch_rule import TreePlace

_Compared = tuple[AgentName, int, int, int]
"""Names rewards that are compared with each other: the agent's, or those of one of its turns (-1: of all), within a
trajectory and behind a branch point of its tree (-1: of all)."""
_FLAT: Final[Mapping[str, TreePlace]] = MappingProxyType({})


def assign_credit(
    samples: Sequence[Sample],
    credit: Mapping[AgentName, CreditConfig],
    rewards: Mapping[AgentName, dict[int, float]],
    places: Mapping[str, TreePlace] = _FLAT,
) -> list[Sample]:
    """Returns ``samples`` in their order, each with its advantage by its agent's estimator, and with the number of
    rewards that its own is compared with, by its agent's grouping:

    - ``trajectory``: one reward per trajectory in which the agent has one.
    - ``agent_turns``: one per *turn* of the agent in the group (Dr.MAS, Feng et al., arXiv 2602.08847, eq. 5: mean
      and deviation over the agent's own active steps). An agent that speaks more often weighs more.
    - ``turn``: one per trajectory that reached the turn: groups by (query, agent, turn) (AT-GRPO, Zhao et al.,
      arXiv 2510.11062, section 4.1). Each agent's turns are counted separately, in the order of the calls.

    In a tree, with any grouping, an agent's turns are compared whose lines parted at the same branch point, and that
    have the same number among its turns from there on: the first ones answer the same prompt, as AT-GRPO's groups do.
    Before the first branch point they are compared over the trajectories, as with ``turn``.

    ``samples`` are all turns of one group. ``places``: by sample id, in trees. ``rewards``: of the agents'
    trajectories, by number. Raises StoreError for an invalid ``sample_id``, ``ValueError`` for a reward that is not
    finite.
    """
    names = [SampleId.parse(sample.sample_id) for sample in samples]
    turns = _turns_of_agents(samples, names)
    # A sample has its advantage by the place of its reward, not by its value: an estimator may well give different
    # advantages to equal rewards. And the rewards of trajectories are compared as trajectories have them, not samples:
    # one in which the agent had no turn counts too, and one with several turns counts once.
    rows: list[tuple[_Compared, int]] = []
    compared: dict[_Compared, dict[int, float]] = {}
    for number, (sample, name, turn) in enumerate(zip(samples, names, turns, strict=True)):
        agent = AgentName(sample.agent)
        grouping = credit[agent].grouping
        place = places.get(sample.sample_id)
        if place is not None:
            key = (agent, place.ordinal, -1 if place.node < 0 else name.trajectory, place.node)
        else:
            key = (agent, turn if grouping == "turn" else -1, -1, -1)
        if place is None and grouping == "trajectory":
            compared[key] = rewards[agent]
            rows.append((key, name.trajectory))
        else:
            compared.setdefault(key, {})[number] = sample.reward
            rows.append((key, number))
    advantages = {
        key: dict(zip(by_row, credit[key[0]].estimator([*by_row.values()]), strict=True))
        for key, by_row in compared.items()
    }
    return [
        replace(sample, advantage=advantages[key][row], group_size=len(compared[key]))
        for sample, (key, row) in zip(samples, rows, strict=True)
    ]


def _turns_of_agents(samples: Sequence[Sample], names: Sequence[SampleId]) -> list[int]:
    """The number of each sample among its agent's turns in its trajectory, from 0."""
    numbers: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for sample, name in zip(samples, names, strict=True):
        numbers[sample.agent, name.trajectory].append(name.turn)
    for turns in numbers.values():
        turns.sort()
    return [
        numbers[sample.agent, name.trajectory].index(name.turn)
        for sample, name in zip(samples, names, strict=True)
    ]
