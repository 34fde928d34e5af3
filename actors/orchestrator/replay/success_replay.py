"""A replay of rare successes: with sparse rewards most groups teach nothing, and those with a success come again."""

from typing import Literal

from ...config_base import Share
from .recent_replay import differ
from .replay_options import ReplayOptions, Rewards


def success_share(rewards: Rewards) -> float:
    """The mean over the agents of the share of trajectories whose reward is at least the greatest of their agent's."""
    shares = [
        sum(reward >= max(rewards) for reward in rewards) / len(rewards)
        for rewards in rewards.values()
        if rewards
    ]
    return sum(shares) / len(shares) if shares else 1.0


class SuccessReplayConfig(ReplayOptions):
    """Groups in which few trajectories have the best reward come again, the rarest successes first: a store of
    successes for sparse rewards (DART, arXiv 2509.23866, keeps recorded successes of hard tasks; self-imitation, Oh et
    al., arXiv 1806.05635)."""

    name: Literal["successes"] = "successes"
    most: Share = 0.5
    """Greatest share of trajectories with the best reward: a group with more of them is not kept."""

    def keeps(self, rewards: Rewards) -> bool:
        return differ(rewards) and success_share(rewards) <= self.most

    def worth(self, rewards: Rewards, oldest: int) -> tuple[float, ...]:
        return (-success_share(rewards), oldest)
