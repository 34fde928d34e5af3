"""Environments of OpenEnv: a real server in a process where the library is installed, and a client that fails."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexmarl.actors.environments.environment import environment_problems, play
from flexmarl.actors.environments.openenv_environment import OpenEnvEnvironment
from flexmarl.actors.errors import InvalidEnvironment, LimitReached
from flexmarl.actors.messages import Query
from flexmarl.actors.workflow import Turn

from ...patience import PATIENCE_S

QUERY = Query("q0", "", {"reset": {"seed": 5}})


class Player:
    """Gives the answers of a list, and then is at its limit."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.prompts = list(answers), list[str]()

    async def generate(self, prompt: Any, **_: Any) -> Turn:
        if not self.answers:
            raise LimitReached("player", "rollout.trajectory_turns", len(self.prompts))
        self.prompts.append(prompt if isinstance(prompt, str) else prompt[-1])
        return Turn("player", self.answers.pop(0), (), ())


class Guesses(OpenEnvEnvironment):
    def prompt(self, observation: Any) -> str:
        return f"{observation['text']}: "

    def action(self, turn: Turn) -> dict[str, int]:
        return {"number": int(turn.text)}


def guesses(client: Any) -> Guesses:
    class OfClient(Guesses):
        def make(self, query: Query) -> Any:
            return client()

    assert environment_problems(OfClient) == []
    return OfClient()


@pytest.fixture
async def address() -> AsyncIterator[str]:
    pytest.importorskip("openenv", reason="openenv is not installed")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    program = Path(__file__).with_name("openenv_server.py")
    process = await asyncio.create_subprocess_exec(sys.executable, str(program), str(port))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0.05)
        writer.close()
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("answers", "total", "prompts"),
    [("7 5", 1.25, "below 8: lower: "), ("1 3", 0.0, "below 8: higher: ")],
    ids=["right", "at its limit"],
)
async def test_trajectories_of_a_real_server(address: str, answers: str, total: float, prompts: str) -> None:
    from openenv.core.generic_client import GenericEnvClient

    async def trajectory() -> tuple[Any, Player]:
        player: Any = Player(*answers.split())
        environment = guesses(lambda: GenericEnvClient(base_url=address))
        return (await play(environment, QUERY, {"player": player})).checked(), player

    for rewards, player in await asyncio.gather(trajectory(), trajectory()):
        assert rewards.by_agent == {"player": total}
        assert rewards.metrics == {"return": total, "steps": 2.0}
        assert "".join(player.prompts) == prompts
    for _ in range(3):  # each has closed its session: the server has two
        await trajectory()


async def test_what_the_server_refuses_fails_the_trajectory(address: str) -> None:
    from openenv.core.generic_client import GenericEnvClient

    class Wrong(Guesses):
        def make(self, query: Query) -> Any:
            return GenericEnvClient(base_url=address)

        def action(self, turn: Turn) -> dict[str, int]:
            return {"letter": 1}

    player: Any = Player("1")
    with pytest.raises(InvalidEnvironment, match=r"Wrong\.step: the environment's server: .*Invalid message"):
        await play(Wrong(), QUERY, {"player": player})


class Client:
    """A client of OpenEnv's form whose ``step`` never ends, raises or returns a result."""

    def __init__(self, result: Any = None, error: Exception | None = None) -> None:
        self.result, self.error, self.is_closed = result, error, False

    async def connect(self) -> None:
        pass

    async def reset(self, *, seed: int) -> Any:
        return SimpleNamespace(observation={"text": "below 8"}, done=False, reward=None)

    async def step(self, action: Any) -> Any:
        if self.error is not None:
            raise self.error
        if self.result is None:
            await asyncio.get_running_loop().create_future()
        return self.result

    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (None, r"step: no answer of the environment's server within 0\.01 s"),
        (ConnectionResetError("reset by the peer"), "step: the environment's server: reset by the peer"),
        (RuntimeError("server is full"), "step: the environment's server: server is full"),
    ],
)
async def test_a_server_that_hangs_or_ends_fails_the_trajectory(
    error: Exception | None, problem: str
) -> None:
    client = Client(error=error)
    environment = guesses(lambda: client)
    environment.answer_timeout_s = 0.01
    player: Any = Player("1")
    with pytest.raises(InvalidEnvironment, match=problem):
        await play(environment, QUERY, {"player": player})
    assert client.is_closed


async def test_a_server_that_can_not_be_reached_fails_the_trajectory() -> None:
    pytest.importorskip("openenv", reason="openenv is not installed")
    from openenv.core.generic_client import GenericEnvClient

    player: Any = Player("1")
    with pytest.raises(InvalidEnvironment, match="connect: the environment's server"):
        await play(
            guesses(lambda: GenericEnvClient(base_url="http://127.0.0.1:9")), QUERY, {"player": player}
        )
