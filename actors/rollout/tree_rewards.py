"""The rewards of a trajectory that branched: each line's are those of a trajectory, and a turn has the mean of its
lines. Pure."""

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import TypeVar

from ..environments.tree_play import LineEnd, TreeEnd
from ..names import AgentName
from .trajectory_rewards import Agents, Amounts, EndedTurn, TrajectoryRewards, trajectory_rewards

_Name = TypeVar("_Name")


def tree_rewards(
    trajectory: str,
    tree: TreeEnd,
    turns: Sequence[EndedTurn],
    agents: Agents,
    *,
    punish: bool,
    left_out: Collection[str] = (),
) -> TrajectoryRewards:
    """Returns the rewards of a tree: those of agents, and the metrics, are means over the lines that were not cut; a
    turn's is the mean over the lines to an end that hold it, as the value of a node is the mean of its leaves
    (TreePO, arXiv 2508.17445), or over the others if all were cut. The arguments are those of ``trajectory_rewards``,
    and so are the errors."""
    lines = [
        (
            end,
            trajectory_rewards(
                trajectory,
                end.rewards,
                [turn for turn in turns if turn.sample_id in end.sample_ids],
                agents,
                punish=punish,
                left_out=left_out,
            ),
        )
        for end in tree.ends
    ]
    whole = [rewards for end, rewards in lines if not end.was_cut]
    held = {turn.sample_id: _of_lines(turn.sample_id, lines) for turn in turns}
    amounts = _turn_amounts(tree)
    of_turns: dict[AgentName, list[float]] = {}
    for turn in turns:
        if turn.sample_id in amounts and turn.sample_id not in left_out:
            of_turns.setdefault(turn.agent, []).append(fmean(amounts[turn.sample_id]))
    return TrajectoryRewards(
        _mean([rewards.before_punishment for rewards in whole], held, punished=False),
        _mean([rewards.used for rewards in whole], held, punished=True),
        of_turns,
        _means([rewards.metrics for rewards in whole]),
    )


def _of_lines(sample_id: str, lines: Sequence[tuple[LineEnd, TrajectoryRewards]]) -> list[TrajectoryRewards]:
    """The rewards of the lines that count for a turn."""
    holding = [(end, rewards) for end, rewards in lines if sample_id in rewards.used.by_sample]
    whole = [rewards for end, rewards in holding if not end.was_cut]
    return whole or [rewards for _, rewards in holding]


def _mean(
    whole: Sequence[Amounts], held: Mapping[str, Sequence[TrajectoryRewards]], *, punished: bool
) -> Amounts:
    by_sample = {
        sample_id: fmean(
            (rewards.used if punished else rewards.before_punishment).by_sample[sample_id]
            for rewards in lines
        )
        for sample_id, lines in held.items()
        if lines
    }
    return Amounts(_means([amounts.by_agent for amounts in whole]), by_sample)


def _turn_amounts(tree: TreeEnd) -> dict[str, list[float]]:
    """By sample id: the turn's own rewards, one for each line that gives it some."""
    amounts: dict[str, list[float]] = {}
    for end in tree.ends:
        for turn, amount in end.rewards.checked().turns:
            amounts.setdefault(turn.sample_id, []).append(amount)
    return amounts


def _means(parts: Sequence[Mapping[_Name, float]]) -> dict[_Name, float]:
    """By name: the mean over the parts that have it, in the order of their first."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: fmean(part[name] for part in parts if name in part) for name in names}
