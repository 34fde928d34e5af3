"""The base of the settings of a replay that the config names.

A replay is one file beside this one, with its two decisions and its settings, and one row of ``replay_config.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

from ...config_base import Config, Count, Natural, Share, Unit
from ...names import AgentName

Rewards = Mapping[AgentName, Sequence[float]]
"""The rewards of a group's trajectories, by agent."""


class ReplayOptions(Config):
    """Settings of a replay; its ``name`` chooses the class."""

    share: Share = 0.25
    """Most groups that come again in a step, as a share of `training.queries_per_step`. Unused places are kept
    for later steps, one group at most."""
    max_staleness: Annotated[Natural, Unit("versions")] | None = None
    """Most versions that a sample which comes again may be older than the policy, at most the run's `max_staleness`.
    `null`: that one."""
    limit: Annotated[Count, Unit("groups")] = 64
    """Most groups that are kept, with all of their tokens, in memory and in checkpoints. The one that is worth least
    makes room."""
    times: Annotated[Count, Unit("times")] = 1
    """Most times that a group comes again."""

    def keeps(self, rewards: Rewards) -> bool:
        """True if a group with these rewards may come again."""
        raise NotImplementedError

    def worth(self, rewards: Rewards, oldest: int) -> tuple[float, ...]:
        """The rank of a group: the greater comes again first. ``oldest``: the oldest version of its samples."""
        raise NotImplementedError
