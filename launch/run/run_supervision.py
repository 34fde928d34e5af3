"""The supervision of a run's actors: two supervisors behind one face.

    the run's own   store, trainer, orchestrator, ...    the first loss ends the run
    restarting      actors with ``ActorSpec.restarted``  each is restarted alone, as often as the config allows

If the second one gives up, the run ends too, with an error that ``is_loss``.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import Any, Final, Self, TypeVar

from ...actors.errors import EngineFailed
from ...core.errors import ActorDead, ActorFailed, FlexmarlError, is_loss
from ...core.ref import ActorRef
from ...core.spans import SpanBatch
from ...core.supervision.node import Node
from ...core.supervision.process_statistics import ProcessStatistics
from ...core.supervision.restart_policy import Intensity
from ...core.supervision.supervisor import AnotherNode, Supervisor
from ...core.system import ActorSystem
from ...core.telemetry import LogLevel
from ...core.waits import ProcessWaits
from ..hosts import env
from .actor_specs import ActorSpec

Api = TypeVar("Api")

RESTARTING: Final = "restarting-supervisor"
_NOWHERE_ELSE: Final[Mapping[str, Node]] = MappingProxyType({})


class RunSupervision:
    """``node``: the one that actors run on, but for those of ``placed``, which have another one; all are closed at the
    end. ``intensity``: of the restarts of all actors that are restarted alone."""

    def __init__(
        self,
        system: ActorSystem,
        node: Node,
        intensity: Intensity,
        log_level: LogLevel = "info",
        placed: Mapping[str, Node] = _NOWHERE_ELSE,
        another_node: AnotherNode | None = None,
    ) -> None:
        self._system = system
        self._node = node
        self._placed = placed
        self._ending = Supervisor(system, node, log_level=log_level)
        self._restarting = Supervisor(
            system,
            node,
            intensity=intensity,
            is_restarted=_may_succeed_again,
            name=RESTARTING,
            log_level=log_level,
        )
        self._restarting.another_node = another_node
        self._both = (self._ending, self._restarting)
        self.restarts = Counter[str]()
        """Number of restarts of each actor."""
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as exits:
            for node in {id(node): node for node in (self._node, *self._placed.values())}.values():
                exits.callback(node.close)
            for supervisor in self._both:
                await exits.enter_async_context(supervisor)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stops the actors that are restarted alone first: for them the end of the others would be a loss."""
        await self._exits.aclose()

    async def wait_failed(self) -> None:
        """Waits until the run can't continue, and raises the reason: ActorDead or ActorFailed."""
        failures = [supervisor.failure for supervisor in self._both]
        await asyncio.wait(failures, return_when=asyncio.FIRST_COMPLETED)
        reasons = [failure.result() for failure in failures if failure.done()]
        raise min(reasons, key=is_loss)  # a loss may be the consequence of another failure

    async def spawn(self, name: str, spec: ActorSpec) -> ActorRef[Any]:
        """Starts an actor on its node, under the supervisor that its ``spec`` asks for, and returns after its
        ``on_start``. Raises the errors of ``Supervisor.spawn``."""
        supervisor = self._restarting if spec.restarted else self._ending
        device = {} if spec.cuda_devices is None else env.cuda_devices(spec.cuda_devices)
        environment = spec.env | device
        node = self._node_of(name)
        return await supervisor.spawn(spec.actor_class, name, spec.setup, env=environment, node=node)

    async def reserve(self, name: str, api: type[Api]) -> ActorRef[Api]:
        """A reference to an actor that will be spawned. Raises OSError."""
        return self._system.ref(name, await self._node_of(name).reserve(name), api)

    def _node_of(self, actor: str) -> Node:
        return self._placed.get(actor, self._node)

    def report_restarts(self, report: Callable[[str, FlexmarlError], None]) -> None:
        """Has ``report`` called for each actor that is restarted alone, with the reason."""

        def count_restart(actor: str, reason: FlexmarlError) -> None:
            self.restarts[actor] += 1
            report(actor, reason)

        self._restarting.on_restart = count_restart

    def report_late(self, report: Callable[[str], None]) -> None:
        """Has ``report`` called for each actor that does not end in good order at the run's end, and is killed."""
        for supervisor in self._both:
            supervisor.on_late = report

    @property
    def restarting(self) -> ActorRef[Any]:
        """The supervisor that restarts actors, for those that find one of them lost."""
        return self._restarting.ref

    def take_up(self, actor: str, lost: ActorDead, node: Node, environment: Mapping[str, str]) -> None:
        """See ``Supervisor.take_up``; ``actor``: one that is restarted alone."""
        self._restarting.take_up(actor, lost, node, environment)

    @property
    def running(self) -> list[str]:
        """The names of all actors that have started and not ended."""
        return [name for supervisor in self._both for name in supervisor.running]

    async def process_statistics(
        self, reported: Callable[[str, ProcessStatistics], None]
    ) -> dict[str, ProcessStatistics]:
        """The figures of this process, and of every running one that answers within 10 s, by actor name. ``reported``:
        is called with each as it comes."""
        ending, restarting = await asyncio.gather(*(s.process_statistics(reported) for s in self._both))
        return restarting | ending

    async def process_spans(
        self, share: float, received: Mapping[str, int], timeout_s: float
    ) -> dict[str, SpanBatch]:
        """The spans of every running process but this one that answers within ``timeout_s``, and of those whose actors
        have failed, by actor name; see ``Supervisor.process_spans``."""
        both = await asyncio.gather(*(s.process_spans(share, received, timeout_s) for s in self._both))
        launcher = self._system.name
        return {name: batch for batches in both for name, batch in batches.items() if name != launcher}

    async def process_waits(self, timeout_s: float) -> dict[str, ProcessWaits]:
        """The waits of this process's actors, and of those of every one that runs or is being started, by actor name;
        see ``Supervisor.process_waits``."""
        ending, restarting = await asyncio.gather(*(s.process_waits(timeout_s) for s in self._both))
        return restarting | ending

    def end_silent(self, error: ActorDead) -> None:
        """Kills the actor that ``error`` names; it counts as lost for that reason."""
        for supervisor in self._both:
            supervisor.end_lost(error)

    async def kill_all(self) -> None:
        """Ends every process at once."""
        await asyncio.gather(*(supervisor.kill_all() for supervisor in self._both))


def _may_succeed_again(error: FlexmarlError) -> bool:
    """True after a loss, or for a broken engine; a recipe's error or a defect would come again."""
    return is_loss(error) or (isinstance(error, ActorFailed) and error.kind == EngineFailed.__name__)
