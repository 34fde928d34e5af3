"""An environment of gymnasium as a workflow: the frozen lake of its own collection."""

from typing import Any

import pytest

from flexmarl.actors.environments.environment import environment_problems, play
from flexmarl.actors.environments.gymnasium_environment import GymnasiumEnvironment
from flexmarl.actors.errors import LimitReached
from flexmarl.actors.messages import Query
from flexmarl.actors.workflow import Turn

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")

QUERY = Query("q0", "", {"seed": 3})


class Lake(GymnasiumEnvironment):
    def make(self, query: Query) -> Any:
        return gymnasium.make("FrozenLake-v1", map_name="4x4", is_slippery=False)

    def prompt(self, observation: Any, info: Any) -> str:
        return f"square {observation}: "

    def action(self, turn: Turn) -> int:
        return "LDRU".index(turn.text)


class Player:
    """Makes the moves of a text, and then is at its limit."""

    def __init__(self, moves: str) -> None:
        self.moves = list(moves)
        self.squares: list[str] = []

    async def generate(self, prompt: Any, **_: Any) -> Turn:
        if not self.moves:
            raise LimitReached("player", "rollout.trajectory_turns", len(self.squares))
        self.squares.append(prompt if isinstance(prompt, str) else prompt[-1])
        return Turn("player", self.moves.pop(0), (), ())


@pytest.mark.parametrize(
    ("moves", "total", "squares"),
    [
        ("RRDDDR", 1.0, "0 1 2 6 10 14"),  # the goal
        ("RD", 0.0, "0 1"),  # a hole
        ("RR", 0.0, "0 1"),  # the limit
    ],
)
async def test_a_trajectory_on_the_frozen_lake(moves: str, total: float, squares: str) -> None:
    player: Any = Player(moves)
    found = (await play(Lake(), QUERY, {"player": player})).checked()
    assert found.by_agent == {"player": total}
    assert found.metrics == {"return": total, "steps": float(len(moves))}
    assert player.squares == [f"square {number}: " for number in squares.split()]


async def test_a_step_may_pay_its_turn() -> None:
    class Steps(Lake):
        by_turn = True

    player: Any = Player("RRDDDR")
    found = await play(Steps(), QUERY, {"player": player})
    assert [(turn.text, reward) for turn, reward in found.turns] == [
        *[(move, 0.0) for move in "RRDDD"],
        ("R", 1.0),
    ]
    assert found.by_agent == {"player": 0.0} and found.metrics["return"] == 1.0


async def test_an_invalid_action_fails_the_trajectory_and_the_environment_is_closed() -> None:
    closed = []

    class Watched(Lake):
        def make(self, query: Query) -> Any:
            made = super().make(query)
            made.unwrapped.close = lambda: closed.append(query.id)
            return made

    players: dict[str, Any] = {"player": Player("X")}
    with pytest.raises(ValueError, match="substring not found"):
        await play(Watched(), QUERY, players)
    assert closed == ["q0"] and environment_problems(Lake) == []
