"""The punishment of turns that come close to their greatest length, or reach it."""

from collections.abc import Mapping

from ..names import AgentName
from ..workflow import Rewards
from .rollout_config import SamplingConfig


def overlong_punishment(tokens: int, longest: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (Yu et al., arXiv 2503.14476, eq. 13), to be added to the reward: -1 ... 0.

    0 up to ``longest - buffer`` tokens, from there falling linearly to -1 at ``longest``, and -1 beyond. No punishment
    if ``buffer`` is 0.
    """
    if not buffer:
        return 0.0
    return min(0.0, max(-1.0, (longest - buffer - tokens) / buffer))


def punish_overlong(
    rewards: Rewards,
    longest_turns: Mapping[AgentName, int],
    sampling: Mapping[AgentName, SamplingConfig],
) -> Rewards:
    """``rewards`` with the punishment of each agent's longest turn: in the paper a trajectory is one turn, here an
    agent has one reward for all its turns. ``longest_turns``: generated tokens, by agent that had a turn."""
    by_agent = {}
    for name, reward in rewards.by_agent.items():
        agent = AgentName(name)
        tokens, limits = longest_turns.get(agent, 0), sampling[agent]
        by_agent[name] = reward + overlong_punishment(tokens, limits.max_new_tokens, limits.overlong_buffer)
    return Rewards(metrics=rewards.metrics, **by_agent)
