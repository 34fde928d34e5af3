"""One run on this machine: the actor processes, from their start to the last of them gone.

    launcher ── Supervisor ──┬─ store
             └─ RunConsole     ├─ trainer
                             ├─ <agent>-0, <agent>-1, ...   (instances)
                             ├─ rollout
                             └─ orchestrator

The first of them to die ends the run, and with it all others.
"""

import asyncio
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Self

from ..actors.inference.instance_setup import InstanceSetup
from ..actors.messages import InstanceApi, OrchestratorApi, RolloutApi, RunResult, StoreApi, TrainerApi
from ..actors.orchestrator.checkpoint import RunState
from ..actors.run_events import ActorSilent
from ..actors.store.store_setup import StoreSetup
from ..actors.store_client import segment_directories
from ..actors.trainer.trainer_setup import TrainerSetup
from ..core.errors import ActorDead
from ..core.ref import ActorRef
from ..core.supervision.supervisor import Supervisor, private_directory
from ..core.system import ActorSystem
from ..core.task_groups import first_error
from . import env
from .console.progress import Progress
from .console.run_console import RunConsole
from .errors import Interrupted
from .run_config import RunConfig
from .run_directory import RunDirectory

_STATISTICS_INTERVAL_S = 1.0
_SILENCE_S = 300.0
_SLOW_START_S = 60.0
_CLASSES = {
    "store": "flexmarl.actors.store.store:Store",
    "trainer": "flexmarl.actors.trainer.trainer:Trainer",
    "instance": "flexmarl.actors.inference.instance:Instance",
    "rollout": "flexmarl.actors.rollout.rollout:Rollout",
    "orchestrator": "flexmarl.actors.orchestrator.orchestrator:Orchestrator",
}
_SIMULATED_CLASSES = {
    **_CLASSES,
    "trainer": "flexmarl.actors.trainer.simulated_trainer:SimulatedTrainer",
    "instance": "flexmarl.actors.inference.simulated_instance:SimulatedInstance",
}


async def run(
    config: RunConfig, directory: RunDirectory, progress: Progress, resume: tuple[Path, RunState] | None
) -> RunResult:
    """Trains until the last step, a stop signal, or a failure.

    The first ctrl-C (SIGINT) or SIGTERM ends the run after the steps under way, with a checkpoint; a second one, or
    one before the training begins, ends it at once (Interrupted). Raises ActorDead or ActorFailed where an actor
    was lost. In every case no process, socket or shared memory is left.
    """
    with _Signals(
        progress
    ) as signals:  # outermost: a signal that comes while all is put away must not harm that
        async with (
            private_directory(env.runtime_base()) as private,
            ActorSystem("launcher", private) as system,
            Supervisor(system, private, directory.logs, env.actor_environment()) as supervisor,
        ):
            console = RunConsole(directory, progress)
            await system.add(console, "console")
            work = asyncio.create_task(
                _train(config, directory, private, supervisor, console, signals, resume)
            )
            death = asyncio.create_task(supervisor.wait_for_death())
            ends: list[asyncio.Future[Any]] = [signals.interrupted, death, system.failure, work]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                signals.stop_gracefully = None
                await _cancelled(work, death)
            # In this order: a death makes calls fail, so it is the cause where both are there.
            if signals.interrupted.done():
                await supervisor.kill_all()
                raise Interrupted(f"stopped by {signals.interrupted.result()}")
            if death.done() and not death.cancelled():
                death.result()
            if system.failure.done():
                raise system.failure.result()
            return work.result()


async def _train(
    config: RunConfig,
    directory: RunDirectory,
    private: Path,
    supervisor: Supervisor,
    console: RunConsole,
    signals: "_Signals",
    resume: tuple[Path, RunState] | None,
) -> RunResult:
    orchestrator = await _start_actors(config, directory, private, supervisor, console, resume)
    await orchestrator.api.start()
    signals.stop_gracefully = lambda: orchestrator.tell_nowait("stop")
    console.background(_watch_processes(supervisor, console), "statistics")
    return await console.ended_with


async def _watch_processes(supervisor: Supervisor, console: RunConsole) -> None:
    """Keeps the console's figures fresh. An actor that does not answer is named; raises ActorDead in the end."""
    last_answer = dict.fromkeys(supervisor.running, time.monotonic())
    silent: set[str] = set()
    await supervisor.statistics()  # what these figures say is of the start
    while True:
        console.refresh(await supervisor.statistics())
        for name in supervisor.running:  # those that are being stopped have no time to answer
            answered_at = last_answer[name]
            silent_s = round(time.monotonic() - answered_at, 1)
            if name in console.processes:
                last_answer[name] = time.monotonic()
                silent.discard(name)
            elif name not in silent:  # also where this process was stopped for long: the next round will tell
                silent.add(name)
                await console.event(ActorSilent(name, silent_s))
            elif silent_s > _SILENCE_S:
                raise ActorDead(name, f"its process runs, but has not answered for {silent_s:g} s")
        await asyncio.sleep(_STATISTICS_INTERVAL_S)


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Signals:
    """SIGINT and SIGTERM while a run goes on: the first asks it to stop, the second ends it.

    ``interrupted`` is set to the name of the signal that ends it.
    """

    def __init__(self, progress: Progress) -> None:
        self.interrupted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stop_gracefully: Callable[[], None] | None = None
        self._progress = progress
        self._asked = False

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._received, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        self.interrupted.cancel()

    def _received(self, number: signal.Signals) -> None:
        if self.stop_gracefully is not None and not self._asked:
            self._asked = True
            name = signal.Signals(number).name
            self._progress.warn(
                f"{name}: stopping after the steps under way; once more stops at once", at_once=True
            )
            self.stop_gracefully()
        elif not self.interrupted.done():
            self.interrupted.set_result(signal.Signals(number).name)


async def _start_actors(
    config: RunConfig,
    directory: RunDirectory,
    private: Path,
    supervisor: Supervisor,
    console: RunConsole,
    resume: tuple[Path, RunState] | None,
) -> ActorRef[OrchestratorApi]:
    """Spawns all actors at once; their references are known before their processes run."""
    instances = {
        str(policy): [supervisor.reference(f"{policy}-{n}", InstanceApi) for n in range(settings.instances)]
        for policy, settings in config.policies.items()
    }
    _prepare_store(directory, private, supervisor.reference("store", StoreApi))
    arguments = _arguments(config, directory, private, supervisor, console, resume, instances)
    classes = _SIMULATED_CLASSES if config.simulated else _CLASSES
    spawned = {name: supervisor.spawn(classes[name], name, kwargs) for name, kwargs in arguments.items()}
    for policy, settings in config.policies.items():
        setup = InstanceSetup(policy, settings.model, config.engine(policy), private)
        for ref in instances[policy]:
            spawned[ref.name] = supervisor.spawn(classes["instance"], ref.name, setup)
    await _all_started(spawned, console)
    return supervisor.reference("orchestrator", OrchestratorApi)


def _prepare_store(directory: RunDirectory, private: Path, store: ActorRef[StoreApi]) -> None:
    """An empty folder: what the store held was of steps after the checkpoint, which are done again."""
    shutil.rmtree(directory.store, ignore_errors=True)
    directory.store.mkdir(mode=0o700)
    directory.store_address.write_text(store.address)  # for `flexmarl store`
    for path in segment_directories(private, directory.store).all():
        path.mkdir(mode=0o700)


def _arguments(
    config: RunConfig,
    directory: RunDirectory,
    private: Path,
    supervisor: Supervisor,
    console: RunConsole,
    resume: tuple[Path, RunState] | None,
    instances: dict[str, list[ActorRef[InstanceApi]]],
) -> dict[str, Any]:
    """The setup, or the constructor's arguments, of every actor there is one of, by the actor's name."""
    store = supervisor.reference("store", StoreApi)
    rollout = supervisor.reference("rollout", RolloutApi)
    recipe = config.recipe_config()
    places = {"memory": str(private), "folder": str(directory.store)}
    return {
        "store": StoreSetup(
            policies={name: agent.policy for name, agent in config.agents.items()},
            runtime_dir=private,
            store_dir=directory.store,
            max_staleness=config.staleness,
            order="query" if config.deterministic else "arrival",
            columns=config.columns(),
            limits=config.store.limits(),
            console=console.ref,
        ),
        "trainer": TrainerSetup(
            policies=config.policy_setups(),
            recipe=recipe,
            total_steps=config.training.steps,
            store=store,
            runtime_dir=private,
            store_dir=directory.store,
            resume_from=resume[0] if resume else None,
        ),
        "rollout": {
            "recipe": recipe,
            "sampling": {name: agent.sampling for name, agent in config.agents.items()},
            "tokenizers": {
                name: config.policies[agent.policy].model.tokenizer_source
                for name, agent in config.agents.items()
            },
            "instances": instances,
            "store": store,
            "orchestrator": supervisor.reference("orchestrator", OrchestratorApi),
            "config": config.rollout,
            "grouping": {name: agent.algorithm.row.grouping for name, agent in config.agents.items()},
            "columns": config.columns(),
            **places,
        },
        "orchestrator": {
            "schedule": config.schedule(),
            "recipe": recipe,
            "trainer": supervisor.reference("trainer", TrainerApi),
            "rollout": rollout,
            "instances": instances,
            "console": console.ref,
            "checkpoints": str(directory.checkpoints),
            "resume_from": resume[1] if resume else None,
        },
    }


async def _all_started(spawned: Mapping[str, Coroutine[Any, Any, object]], console: RunConsole) -> None:
    """Waits for all of them, and shows how far that is; loading a large model lasts. Raises what the first raises."""
    slow_from = time.monotonic() + _SLOW_START_S
    with first_error():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(spawning, name=name) for name, spawning in spawned.items()]
            while starting := [task for task in tasks if not task.done()]:
                names = ", ".join(task.get_name() for task in starting)
                which = f" (not yet: {names})" if time.monotonic() > slow_from else ""
                await console.phase(f"starting actors{which}", len(tasks) - len(starting), len(tasks))
                await asyncio.wait(
                    starting, timeout=_STATISTICS_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
                )
