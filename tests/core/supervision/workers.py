"""A system whose supervisor restarts the workers of ``echo.py``."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexmarl.core.errors import ActorDead, FlexmarlError
from flexmarl.core.protocol.session import Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.restart_policy import Intensity
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.zeromq import Tcp

from ...patience import PATIENCE_S
from ..echo import Worker

ECHO = "echo:Echo"
WORKER = "echo:Worker"
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parents[3] / "scripts" / "src"), str(Path(__file__).parents[1])]
    )
}


async def eventually(read: Any, accept: Any) -> Any:
    """The first result of ``read`` that ``accept`` takes."""
    async with asyncio.timeout(PATIENCE_S):
        while not accept(value := await read()):
            await asyncio.sleep(0.01)
    return value


@dataclass
class Bench:
    """A system and a supervisor that restarts."""

    system: ActorSystem
    supervisor: Supervisor
    diary: Path

    async def start(
        self, name: str, *, process: bool = True, actor_class: type[Worker] | str = WORKER, **kwargs: Any
    ) -> ActorRef[Worker]:
        arguments = {"diary": str(self.diary), **kwargs}
        ref = await self.supervisor.spawn(actor_class, name, arguments, process=process)
        return self.system.ref(name, ref.address, Worker)

    def written(self) -> list[str]:
        return self.diary.read_text().splitlines()


@asynccontextmanager
async def bench(
    private: Path,
    logs: Path,
    *,
    intensity: Intensity | None = None,
    tcp: Tcp | None = None,
    settings: Settings | None = None,
    is_restarted: Callable[[FlexmarlError], bool] = lambda _: True,
) -> AsyncIterator[Bench]:
    diary = logs / "diary"
    diary.touch()
    async with (
        ActorSystem("tests", private, tcp=tcp, settings=settings or Settings()) as system,
        Supervisor(
            system,
            ProcessNode(system, private, logs, ENVIRONMENT),
            intensity=intensity or Intensity(3, 60),
            is_restarted=is_restarted,
        ) as supervisor,
    ):
        yield Bench(system, supervisor, diary)
    assert len(asyncio.all_tasks()) == 1, "a task outlived its system"


async def fate(call: Any) -> str:
    """The class of the error that a call raises."""
    try:
        await call
    except FlexmarlError as error:
        return type(error).__name__
    return "answered"


async def pid_of(worker: ActorRef[Worker]) -> int:
    """0 while it is dead."""
    try:
        return await worker.api.pid()
    except ActorDead:
        return 0
