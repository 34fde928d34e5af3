"""Steps of training in virtual time on ``SharedPool``, the pool that trains runs. Its slot workers only take time.

Between two steps states stay where they are, as in a run. Before the first, all policies are built.
"""

import asyncio
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from flexmarl.actors.names import PolicyName, Step
from flexmarl.actors.recipe.recipe import RecipeConfig
from flexmarl.actors.trainer.backends.backend_config import SimulatedTrainerConfig
from flexmarl.actors.trainer.pool.pool_config import SharedPoolConfig
from flexmarl.actors.trainer.pool.shared_pool import SharedPool
from flexmarl.actors.trainer.pool.slot_choice import AllocatorConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup, SharedPoolSetup, TrainerSetup
from flexmarl.core.testing import virtual_time
from flexmarl.launch.hosts import env

from .pool_load import Computation, Costs, StepLoad
from .pool_slots import TimedSlot, Unheard, timed_batch


@dataclass(frozen=True, slots=True)
class StepFigures:
    """``lost_s``: seconds, summed over the slots, in which a state moved and the slot computed nothing."""

    step_s: float
    lost_s: float
    suspensions: int


@dataclass(frozen=True, slots=True)
class _System:
    """The trainer's system, as far as the pool needs it."""

    directory: Path
    tcp: None = None
    keys: None = None

    def clock(self) -> float:
        return asyncio.get_running_loop().time()


def run_steps(
    costs: Costs, slots: int, loads: Sequence[StepLoad], config: AllocatorConfig | None = None
) -> list[StepFigures]:
    """Runs all computations of each of ``loads``, one step after the other. No loop may run in this thread."""
    rules = (config or AllocatorConfig()).model_dump()
    with tempfile.TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as folder:
        pool = SharedPoolConfig(slots=slots, **rules)
        return virtual_time.run(_Run(costs, pool, Path(folder)).steps(loads))


class _Run:
    def __init__(self, costs: Costs, config: SharedPoolConfig, folder: Path) -> None:
        self._costs, self._config, self._folder = costs, config, folder
        self._steps = 0

    async def steps(self, loads: Sequence[StepLoad]) -> list[StepFigures]:
        self._slots = [TimedSlot(f"slot-{n}", self._costs) for n in range(self._config.slot_count)]
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[None]] = []

            def background(work: Coroutine[Any, Any, None], name: str) -> None:
                tasks.append(group.create_task(work, name=name))

            self._pool = self._made_pool(background)
            await self._pool.start()
            figures = [await self._step(load) for load in loads]
            for task in tasks:
                task.cancel()
        await self._pool.close()
        return figures

    def _made_pool(self, background: Any) -> SharedPool:
        unheard: Any = Unheard()
        setup = SharedPoolSetup(
            self._config, cast(Any, self._slots), unheard, unheard, self._folder / "suspended"
        )
        policies = {
            policy: PolicySetup(trainer=SimulatedTrainerConfig(ranks=cost.ranks), credit={})
            for policy, cost in self._costs.items()
        }
        recipe = RecipeConfig(folder=str(self._folder), data={}, seed=0)
        trainer = TrainerSetup(policies, recipe, 0, unheard, self._folder, pool=setup)
        system: Any = _System(self._folder)
        return SharedPool(trainer, setup, system, background, lambda ref: None)

    async def _step(self, load: StepLoad) -> StepFigures:
        self._steps += 1
        loop = asyncio.get_running_loop()
        started, lost_s, _ = loop.time(), self._lost_s(), self._suspensions()
        async with asyncio.TaskGroup() as group:
            for policy, computations in load.items():
                group.create_task(self._policy_step(policy, computations, started))
        return StepFigures(loop.time() - started, self._lost_s() - lost_s, self._suspensions())

    async def _policy_step(
        self, policy: PolicyName, computations: Sequence[Computation], started: float
    ) -> None:
        last: asyncio.Task[object] | None = None
        async with asyncio.TaskGroup() as group:
            for one in computations:
                if one.follows and last is not None:
                    await last
                else:
                    await asyncio.sleep(started + one.ready_s - asyncio.get_running_loop().time())
                last = group.create_task(self._computed(policy, one))

    async def _computed(self, policy: PolicyName, one: Computation) -> object:
        if one.is_step:
            return await self._pool.optimizer_step(policy, Step(self._steps))
        return await self._pool.accumulate(policy, timed_batch(one.seconds))

    def _lost_s(self) -> float:
        return sum(slot.lost_s for slot in self._slots)

    def _suspensions(self) -> int:
        """Since the last call."""
        return sum(int(self._pool.figures(policy)["suspensions"]) for policy in self._costs)
