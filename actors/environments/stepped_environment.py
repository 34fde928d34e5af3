"""Environments of one agent whose steps have rewards, as those of gymnasium and OpenEnv: what they share."""

from abc import abstractmethod
from typing import Any

from ..errors import LimitReached
from ..workflow import Rewards, Turn
from .environment import Environment


class SteppedEnvironment(Environment):
    """``agent``: its name in the config. Its reward is the sum of the rewards of its steps. With ``by_turn = True``
    each step's reward is that of its turn instead, for algorithms whose ``rewards`` are ``turn`` or ``both``."""

    agent = "player"
    by_turn = False

    def __init__(self) -> None:
        self.paid: list[tuple[Turn, float]] = []

    @abstractmethod
    def action(self, turn: Turn) -> Any:
        """The action of an answer. For an answer without one, return another action, or raise an error: the trajectory
        fails."""
        raise NotImplementedError

    def rewards(self) -> Rewards:
        """The rewards at the end, also at a limit of turns or tokens."""
        total = sum(reward for _, reward in self.paid)
        metrics = {"return": total, "steps": float(len(self.paid))}
        if not self.by_turn:
            return Rewards(metrics=metrics, **{self.agent: total})
        rewards = Rewards(metrics=metrics, **{self.agent: 0.0})
        for turn, reward in self.paid:
            rewards.of(turn, reward)
        return rewards

    async def truncated(self, limit: LimitReached) -> Rewards:
        return self.rewards()
