"""A parallel environment of PettingZoo as a workflow."""

from typing import Any

import pytest

from flexmarl.actors.environments.environment import environment_problems, play
from flexmarl.actors.environments.parallel_environment import ParallelEnvironment
from flexmarl.actors.errors import LimitReached
from flexmarl.actors.messages import Query
from flexmarl.actors.workflow import Turn

pettingzoo = pytest.importorskip("pettingzoo", reason="PettingZoo is not installed")

from gymnasium.spaces import Discrete  # noqa: E402
from pettingzoo.test import parallel_api_test  # noqa: E402

ROUNDS, COINS = Discrete(4), Discrete(2)
QUERY = Query("q0", "", {"seed": 3})


class Pennies(pettingzoo.ParallelEnv):  # type: ignore[misc,name-defined]
    """Matching pennies, three rounds; ``even`` wins equal coins. ``odd`` leaves after the second round."""

    metadata = {"name": "pennies_v0"}  # noqa: RUF012  # as PettingZoo reads it
    possible_agents = ["even", "odd"]  # noqa: RUF012

    def observation_space(self, agent: str) -> Any:
        return ROUNDS

    def action_space(self, agent: str) -> Any:
        return COINS

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.round, self.closed = list(self.possible_agents), 0, False
        return dict.fromkeys(self.agents, 0), {agent: {"seed": seed} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        self.round += 1
        playing, won = self.agents, len(set(actions.values())) == 1
        rewards = {agent: 1.0 if (agent == "even") == won else -1.0 for agent in playing}
        ended = {agent: self.round == 3 or (agent == "odd" and self.round == 2) for agent in playing}
        self.agents = [agent for agent in playing if not ended[agent]]
        observations = dict.fromkeys(playing, self.round)
        return (
            observations,
            rewards,
            ended,
            dict.fromkeys(playing, False),
            {agent: {} for agent in playing},
        )

    def close(self) -> None:
        self.closed = True


class Game(ParallelEnvironment):
    def make(self, query: Query) -> Any:
        return Pennies()

    def prompt(self, agent: str, observation: Any, info: Any) -> str:
        return f"{agent} {observation} {info.get('seed', '')}"

    def action(self, agent: str, turn: Turn) -> int:
        return "HT".index(turn.text)


class Player:
    def __init__(self, name: str, coins: str) -> None:
        self.name, self.coins = name, list(coins)
        self.read: list[str] = []

    async def generate(self, prompt: Any, **_: Any) -> Turn:
        if not self.coins:
            raise LimitReached(self.name, "rollout.trajectory_turns", len(self.read))
        self.read.append(prompt if isinstance(prompt, str) else prompt[-1])
        return Turn(self.name, self.coins.pop(0), (), ())


def test_the_game_keeps_the_interface() -> None:
    parallel_api_test(Pennies(), num_cycles=20)
    assert environment_problems(Game) == []
    assert environment_problems(ParallelEnvironment) == [
        "ParallelEnvironment.action is missing",
        "ParallelEnvironment.make is missing",
    ]


async def test_agents_move_at_once_until_they_leave() -> None:
    even: Any = Player("even", "HHH")
    odd: Any = Player("odd", "HT")
    game = Game()
    found = (await play(game, QUERY, {"even": even, "odd": odd})).checked()
    assert found.by_agent == {"even": 1.0, "odd": 0.0} and found.metrics == {"steps": 3.0}
    assert even.read == ["even 0 3", "even 1 ", "even 2 "] and odd.read == ["odd 0 3", "odd 1 "]
    assert isinstance(game.env, Pennies) and game.env.closed


async def test_a_step_may_pay_its_turns() -> None:
    class Rounds(Game):
        by_turn = True

    players: dict[str, Any] = {"even": Player("even", "HHH"), "odd": Player("odd", "HT")}
    found = await play(Rounds(), QUERY, players)
    assert [(turn.agent, reward) for turn, reward in found.turns] == [
        ("even", 1.0),
        ("odd", -1.0),
        ("even", -1.0),
        ("odd", 1.0),
        ("even", 1.0),
    ]
    assert found.by_agent == {"even": 0.0, "odd": 0.0}


async def test_a_limit_keeps_the_rewards_so_far() -> None:
    players: dict[str, Any] = {"even": Player("even", "H"), "odd": Player("odd", "T")}
    assert (await play(Game(), QUERY, players)).by_agent == {"even": -1.0, "odd": 1.0}
