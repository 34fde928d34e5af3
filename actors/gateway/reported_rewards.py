"""The rewards that a program reports as JSON. Pure.

    0.5                                             the team's
    {"agents": {"solver": 1.0, "critic": 0.2},      by agent
     "team": 0.5,
     "turns": {"solver": [0.0, null, 1.0]},         of the agent's turns in the order of their ends; null: none
     "metrics": {"tests_passed": 3}}

All keys may be left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...core.base.texts import guess
from ..errors import InvalidReward
from ..workflow import Rewards, Turn

_KEYS: Final = ("agents", "team", "turns", "metrics")


def reported_rewards(report: Any, turns: Sequence[Turn]) -> Rewards:
    """``turns``: of the session, in the order of their ends. Raises ValueError for another form, and for what
    ``Rewards`` refuses."""
    try:
        if not isinstance(report, Mapping):
            return Rewards().of_team(report)
        if unknown := [key for key in report if key not in _KEYS]:
            raise ValueError(
                f"unknown key {unknown[0]!r}; known are: {', '.join(_KEYS)}{guess(unknown[0], _KEYS)}"
            )
        rewards = Rewards(metrics=_object(report, "metrics"), **_object(report, "agents"))
        if report.get("team") is not None:
            rewards.of_team(report["team"])
        for agent, amounts in _object(report, "turns").items():
            _add_turns(rewards, agent, amounts, [turn for turn in turns if turn.agent == agent])
    except InvalidReward as error:
        raise ValueError(str(error)) from error
    return rewards


def _object(report: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = report.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {type(value).__name__}, needs an object")
    return dict(value or {})


def _add_turns(rewards: Rewards, agent: str, amounts: Any, turns: Sequence[Turn]) -> None:
    if not isinstance(amounts, list):
        raise ValueError(f"turns.{agent} is {type(amounts).__name__}, needs a list")
    if len(amounts) > len(turns):
        raise ValueError(f"turns.{agent} has {len(amounts)} rewards, the agent has {len(turns)} turns")
    for turn, amount in zip(turns, amounts, strict=False):
        if amount is not None:
            rewards.of(turn, amount)
