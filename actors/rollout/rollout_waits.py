"""A rollout worker's waits: which trajectories stand where in the recipe, and which turns wait for whom."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

from ...core.waits import OpenWaits, Wait, group_waits
from ..recipe.recipe_lines import lines_of_task, lines_of_threads
from .rollout_config import RolloutConfig
from .trajectory import Trajectory

_SHOWN: Final = 3


class RolloutWaits:
    """``ended``: turns, or parts of them, and trajectories that have ended."""

    def __init__(self, folder: Path, config: RolloutConfig) -> None:
        """``folder``: the recipe's."""
        self.ended = 0
        self._folder = folder
        self._config = config
        self._open = OpenWaits()
        self._running: dict[Trajectory, asyncio.Task[Any]] = {}
        self._setup: tuple[asyncio.Task[Any] | None, float] | None = None

    # ------------------------------------------------------------------ what happens

    @contextmanager
    def setup(self) -> Iterator[None]:
        """The recipe's ``setup`` runs in the present task."""
        self._setup = asyncio.current_task(), asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._setup = None

    def began(self, trajectory: Trajectory, work: "asyncio.Task[Any]") -> None:
        """A trajectory has begun; ``work`` is the task in which its workflow runs."""
        self._running[trajectory] = work

    def over(self, trajectory: Trajectory) -> None:
        """A trajectory has ended, or its deadline has passed: it waits for nothing any more."""
        self.ended += 1
        del self._running[trajectory]

    @contextmanager
    def turn(self, trajectory: Trajectory, text: str, actor: str) -> Iterator[None]:
        """A turn waits for ``actor``."""
        loop = asyncio.get_running_loop()
        if not trajectory.turns_open:
            trajectory.environment_s += loop.time() - trajectory.active_at
        trajectory.turns_open += 1
        try:
            with self._open.open(text, actor=actor):
                yield
            self.ended += 1  # the loss of an instance does not count
        finally:
            trajectory.turns_open -= 1
            trajectory.active_at = loop.time()

    def returned(self, trajectory: Trajectory) -> None:
        """The trajectory's workflow has returned."""
        now = asyncio.get_running_loop().time()
        if not trajectory.turns_open:
            trajectory.reward_s += now - trajectory.active_at
        trajectory.active_at = now

    @contextmanager
    def judge(self, trajectory: Trajectory, limit: str) -> Iterator[None]:
        """The trajectory's workflow has returned: its rewards are to come from outside the run, within ``limit``."""
        trajectory.judge_limit = limit
        trajectory.active_at = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            trajectory.judge_limit = ""
            self.returned(trajectory)

    @contextmanager
    def service(self, trajectory: Trajectory, text: str, limit: str, actor: str) -> Iterator[None]:
        """The trajectory's workflow waits for an outside service. ``actor``: the one that answers; empty for this
        worker."""
        trajectory.services_open += 1
        try:
            with self._open.open(text, limit, actor):
                yield
            self.ended += 1
        finally:
            trajectory.services_open -= 1

    def of_actor(self, text: str, actor: str) -> AbstractContextManager[None]:
        """As ``OpenWaits.open``."""
        return self._open.open(text, actor=actor)

    # ------------------------------------------------------------------ for people

    def current(self) -> list[Wait]:
        """All waits of this worker now: of the recipe's setup, of trajectories in the recipe's own code, of turns."""
        now = asyncio.get_running_loop().time()
        return [*self._of_setup(now), *self._of_trajectories(now), *self._open.current()]

    def _of_setup(self, now: float) -> Iterator[Wait]:
        if self._setup is not None:
            task, since = self._setup
            lines = [] if task is None else lines_of_task(self._folder, task)
            place = "; ".join(dict.fromkeys(lines + lines_of_threads(self._folder)))
            limit = f"rollout.setup_timeout_s={self._config.setup_timeout_s:g} ends it"
            yield Wait(f"setup() of the recipe{f', at {place}' if place else ''}", now - since, limit)

    def _of_trajectories(self, now: float) -> list[Wait]:
        """Trajectories that wait for no turn and no service: they stand in the recipe's own code."""
        standing: dict[tuple[str, str], list[Trajectory]] = {}
        for trajectory, work in self._running.items():
            if not (trajectory.turns_open or trajectory.services_open or work.done()):
                standing.setdefault(self._place(trajectory, work), []).append(trajectory)
        waits = []
        for (place, limit), trajectories in standing.items():
            names = [trajectory.name for trajectory in trajectories[:_SHOWN]]
            more = ", ..." if len(trajectories) > _SHOWN else ""
            noun = "trajectory" if len(trajectories) == 1 else "trajectories"
            text = f"{len(trajectories)} {noun} ({', '.join(names)}{more}) {place}"
            waits.append(Wait(text, now - min(trajectory.active_at for trajectory in trajectories), limit))
        return group_waits(waits)

    def _place(self, trajectory: Trajectory, work: "asyncio.Task[Any]") -> tuple[str, str]:
        """The trajectory's place, and the setting that ends it."""
        if trajectory.is_session and trajectory.judge_limit:
            return "in a session of a service, without a call or rewards", f"{trajectory.judge_limit} ends it"
        if trajectory.judge_limit:
            text = "for rewards that a program outside the run gives: does the judge run?"
            return text, f"{trajectory.judge_limit} ends it"
        limit = f"rollout.trajectory_timeout_s={self._config.trajectory_timeout_s:g} ends it"
        if trajectory.programs.running:
            command, program_limit = trajectory.programs.running[0]
            return (
                f"in the program {command}, which asks for no turn",
                f"{program_limit} ends it" if program_limit else limit,
            )
        lines = lines_of_task(self._folder, work)
        return f"at {'; '.join(lines)}" if lines else "outside the recipe's own code", limit
