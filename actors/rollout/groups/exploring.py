"""The explorations of a running group: played together before its own trajectories begin."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ....core.base.task_groups import first_error
from ...names import AgentName, PolicyName
from ..trajectory import Trajectory
from .explorations import choose, have_no_contrast
from .group import Decision

if TYPE_CHECKING:
    from .group_run import GroupRun, TrajectoryEnd


async def explore(
    run: "GroupRun",
    explorers: Mapping[PolicyName, PolicyName],
    agents: Collection[AgentName],
    play: Callable[[Trajectory], Coroutine[Any, Any, "TrajectoryEnd"]],
) -> list[Decision]:
    """Returns the first decisions of the group: the start of its trajectories, with the numbers of those of its
    explorations that are played again, if it has any. ``explorers``: by policy. ``agents``: whose rewards choose.
    ``play``: runs a trajectory to its end; its errors are raised."""
    rule = run.explores
    if rule is None:
        return run.group.start()
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            playing = [
                tasks.create_task(play(run.begin_exploration(number, explorers)))
                for number in range(rule.count)
            ]
    ends = [task.result() for task in playing]
    rewards = {
        end.trajectory.number: reward_of(end.trajectory, agents) for end in ends if end.failure is None
    }
    run.failed_explorations = len(ends) - len(rewards)
    if rule.skip_equal and have_no_contrast(rewards):
        return run.give_up(f"its {len(rewards)} explorations have equal rewards")
    return run.group.start(choose(rewards, rule.count, run.group.first_size), rule.count)


def reward_of(trajectory: Trajectory, agents: Collection[AgentName]) -> float:
    """The mean reward, as it is trained, of those of ``agents`` that have one."""
    rewards = trajectory.rewards.used.by_agent
    return fmean([rewards[agent] for agent in agents if agent in rewards] or [0.0])


def exploration_figures(
    explorations: Mapping[int, Trajectory],
    members: Sequence[Trajectory],
    agents: Collection[AgentName],
    failed: int,
) -> dict[str, int]:
    """Figures of a closed group, by their names in ``figures.py``. ``members``: the trajectories that count."""
    unlike = [
        member
        for member in members
        if (explored := explorations.get(member.number)) is not None
        and reward_of(explored, agents) != reward_of(member, agents)
    ]
    return {
        "explorations": len(explorations),
        "explored_tokens": sum(trajectory.used(None)[1] for trajectory in explorations.values()),
        "failed_explorations": failed,
        "unlike_explorations": len(unlike),
    }
