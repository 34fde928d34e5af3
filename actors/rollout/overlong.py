"""What a turn costs that comes close to its longest length, or reaches it."""

from collections.abc import Mapping

from ..workflow import Rewards
from .rollout_config import SamplingConfig


def overlong_punishment(tokens: int, longest: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (Yu et al., arXiv 2503.14476, eq. 13), to be added to the reward: -1 ... 0.

    0 up to ``longest - buffer`` tokens, from there falling linearly to -1 at ``longest``, and -1 beyond. ``buffer`` 0
    is no punishment at all.
    """
    if not buffer:
        return 0.0
    return min(0.0, max(-1.0, (longest - buffer - tokens) / buffer))


def punished(
    rewards: Rewards, longest_turns: Mapping[str, int], sampling: Mapping[str, SamplingConfig]
) -> Rewards:
    """``rewards`` with the punishment of each agent's longest turn: in the paper a trajectory is one turn, here an
    agent has one reward for all of them. ``longest_turns``: generated tokens, by agent that had a turn."""
    by_agent = {
        agent: reward
        + overlong_punishment(
            longest_turns.get(agent, 0), sampling[agent].max_new_tokens, sampling[agent].overlong_buffer
        )
        for agent, reward in rewards.by_agent.items()
    }
    return Rewards(metrics=rewards.metrics, **by_agent)
