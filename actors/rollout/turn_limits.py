"""The limits of a trajectory's turns and generated tokens, of each agent and of all. Pure."""

from collections.abc import Iterator, Mapping

from ..errors import LimitReached
from ..names import AgentName
from .rollout_config import RolloutConfig, SamplingConfig
from .trajectory import Trajectory


class TurnLimits:
    """Limits count the turns that have begun, and the tokens of those that have ended: turns that run at the same time
    do not see each other's tokens."""

    def __init__(self, config: RolloutConfig, sampling: Mapping[AgentName, SamplingConfig]) -> None:
        self._of_all = (config.trajectory_turns, config.trajectory_tokens)
        self._of_agent = {
            agent: (limits.trajectory_turns, limits.trajectory_tokens) for agent, limits in sampling.items()
        }
        self._are_off = all(limits == (None, None) for limits in (self._of_all, *self._of_agent.values()))

    def begin(self, agent: AgentName, trajectory: Trajectory) -> int | None:
        """The most tokens that the agent's next turn may have; None without a limit of tokens.

        Raises LimitReached if the turn would be beyond a limit, and marks the trajectory."""
        if self._are_off:
            return None
        remaining: int | None = None
        for key, limit, begun, tokens, is_of_turns in self._limits(agent, trajectory):
            if (begun if is_of_turns else tokens) >= limit:
                trajectory.limited = True
                raise LimitReached(agent, key, limit)
            if not is_of_turns:
                remaining = limit - tokens if remaining is None else min(remaining, limit - tokens)
        return remaining

    def _limits(self, agent: AgentName, trajectory: Trajectory) -> Iterator[tuple[str, int, int, int, bool]]:
        """Each limit that is set: its key, itself, turns begun, tokens, and True if it is one of turns."""
        section = f"agents.{agent}.sampling"
        for where, limits, of in (
            (section, self._of_agent[agent], agent),
            ("rollout", self._of_all, None),
        ):
            begun, tokens = trajectory.used(of)
            for kind, limit in zip(("turns", "tokens"), limits, strict=True):
                if limit is not None:
                    yield f"{where}.trajectory_{kind}", limit, begun, tokens, kind == "turns"
