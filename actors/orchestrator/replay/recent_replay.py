"""A replay of the newest groups whose rewards differ: the samples of a step are used more than once."""

from typing import Literal

from .replay_options import ReplayOptions, Rewards


def differ(rewards: Rewards) -> bool:
    """True if the rewards of some agent differ: the group has an advantage that is not 0."""
    return any(len(set(of_agent)) > 1 for of_agent in rewards.values())


class RecentReplayConfig(ReplayOptions):
    """The newest groups whose rewards differ come again: fewer generated tokens for each optimizer step (ACER, Wang et
    al., arXiv 1611.01224, has the mixture of new and old trajectories)."""

    name: Literal["recent"] = "recent"

    def keeps(self, rewards: Rewards) -> bool:
        return differ(rewards)

    def worth(self, rewards: Rewards, oldest: int) -> tuple[float, ...]:
        return (oldest,)
