"""Rewards as programs report them."""

from typing import Any

import pytest

from flexmarl.actors.gateway.reported_rewards import reported_rewards
from flexmarl.actors.workflow import Turn

TURNS = [
    Turn(agent, "3", (1,), (2,), f"{agent}-{number}") for number in range(2) for agent in ("solver", "critic")
]


def test_a_number_is_the_teams() -> None:
    assert reported_rewards(0.5, TURNS).team == 0.5


def test_each_kind_has_its_key() -> None:
    report = {
        "agents": {"solver": 1},
        "team": 0.5,
        "turns": {"critic": [None, 0.25]},
        "metrics": {"passed": 3},
    }
    rewards = reported_rewards(report, TURNS).checked()
    assert (rewards.by_agent, rewards.team, rewards.metrics) == ({"solver": 1.0}, 0.5, {"passed": 3.0})
    assert [(turn.sample_id, reward) for turn, reward in rewards.turns] == [("critic-1", 0.25)]


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        ("1", "must be a finite number"),
        ({"agent": {}}, "unknown key 'agent'; known are: agents, team, turns, metrics"),
        ({"agents": 1.0}, "agents is float, needs an object"),
        ({"agents": {"solver": None}}, "reward of 'solver' is None"),
        ({"turns": {"solver": 1.0}}, "turns.solver is float, needs a list"),
        ({"turns": {"solver": [0, 0, 0]}}, "turns.solver has 3 rewards, the agent has 2 turns"),
        ({"metrics": {"passed": "all"}}, "metric 'passed'"),
    ],
)
def test_anything_else_is_refused(report: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        reported_rewards(report, TURNS)
