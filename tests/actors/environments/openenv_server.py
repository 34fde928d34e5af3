"""A server of OpenEnv for tests: ``python openenv_server.py PORT``. The right number is worth 1, a higher one 0.25."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):  # type: ignore[misc]
    number: int


class Hint(Observation):  # type: ignore[misc]
    text: str


class Numbers(Environment[Guess, Hint, State]):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._wanted = State(), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._wanted = (seed or 0) % 8
        return Hint(text="below 8")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.number == self._wanted:
            return Hint(text="right", reward=1.0, done=True)
        too_high = action.number > self._wanted
        return Hint(text="lower" if too_high else "higher", reward=0.25 if too_high else 0.0, done=False)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
