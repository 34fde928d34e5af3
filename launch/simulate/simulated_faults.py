"""Random faults of a simulated run: killed actors and nodes, and hosts that are frozen, cut off, slow or lost.

A host is cut off or frozen for a while, or for good. The head and the node notice each other's silence by their
heartbeats: the head gives the node up, and the node ends its actors, which may run on until then. If the host can be
reached again, what they have sent comes too late, and the node joins again.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import combinations
from typing import Final

from ...core.base.task_groups import first_error
from ...core.errors import ActorDead
from ...core.testing.memory_node import MemoryNode
from ...core.wire.memory import MemoryNetwork
from .simulated_disk import SimulatedDisk
from .simulated_hosts import SimulatedHost

ESSENTIAL: Final = ("store", "trainer", "orchestrator", "router")
"""The actors whose loss ends a run."""


class FaultKind(StrEnum):
    """``KILL``: of an actor that is restarted alone; ``FATAL_KILL``: of one whose loss ends the run; ``KILL_NODE``: of
    a node's process, with which its actors end. ``FREEZE``: of an actor that is restarted alone; ``PAUSE``: of any, too
    short for a loss, so that only the order of messages changes. ``CUT``: of the link between two hosts;
    ``CUT_NODES``: of one between two that the head still reaches; ``ISOLATE``: of all links of a host.
    ``HOST_CRASH``: its loss; it and all its actors end silently, and it may start again. ``HEAD_POWER``: the head's
    loss, whose disk has only what was forced to it; the run is resumed. ``FULL_DISK``: of the head. ``SLOW``: all
    messages are."""

    KILL = "kill"
    FATAL_KILL = "fatal kill"
    KILL_NODE = "kill node"
    FREEZE = "freeze"
    PAUSE = "pause"
    FREEZE_HOST = "freeze host"
    CUT = "cut"
    CUT_NODES = "cut between nodes"
    ISOLATE = "isolate"
    HOST_CRASH = "host crash"
    HEAD_POWER = "head power"
    FULL_DISK = "full disk"
    SLOW = "slow"


ALL_KINDS: Final[Mapping[FaultKind, float]] = {
    FaultKind.KILL: 3.0,
    FaultKind.FATAL_KILL: 1.0,
    FaultKind.KILL_NODE: 1.0,
    FaultKind.FREEZE: 2.0,
    FaultKind.PAUSE: 2.0,
    FaultKind.FREEZE_HOST: 2.0,
    FaultKind.CUT: 2.0,
    FaultKind.CUT_NODES: 2.0,
    FaultKind.ISOLATE: 2.0,
    FaultKind.HOST_CRASH: 1.0,
    FaultKind.HEAD_POWER: 1.0,
    FaultKind.FULL_DISK: 1.0,
    FaultKind.SLOW: 1.0,
}

_SLOW_S: Final = 0.1
"""The most seconds that a slow message takes."""

_PAUSE_S: Final = 0.1
"""The most seconds of a pause: less than a heartbeat of the drawn runs, after which a silent peer may be lost."""

_ROLES: Final = ("rollout-", "slot-")
"""Beginnings of the names of actors. The others that are restarted alone are instances, named by their policies."""

CUTS: Final = (FaultKind.CUT, FaultKind.CUT_NODES)
"""Cuts of single links."""

_OF_HOSTS: Final = (*CUTS, FaultKind.FREEZE_HOST, FaultKind.ISOLATE, FaultKind.HOST_CRASH)


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One that is to come: its beginning, its kind, its seconds, and the place of its target among those that can be
    hit then, in [0, 1). So it stays the same fault if others of the plan are left out. Roles of actors have equal
    shares of the places, and so have the actors of a role: a run has many instances, and few slots."""

    at_s: float
    kind: FaultKind
    lasts_s: float
    place: float


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """``every_s``: the mean seconds between two, which are drawn from an exponential distribution, as is their
    duration, with the mean ``lasts_s``. ``most``: of a whole run, so that it ends. ``for_good``: the share of faults
    of hosts that do not end. ``begin_s``: the first is later than this. ``kinds``: how often each is drawn, in
    relation to the others. ``least_place``: of targets, below 1."""

    every_s: float = 5.0
    begin_s: float = 0.0
    least_place: float = 0.0
    most: int = 6
    lasts_s: float = 1.0
    for_good: float = 0.1
    kinds: Mapping[FaultKind, float] = field(default_factory=lambda: ALL_KINDS)

    def draw(self, seed: int) -> tuple[PlannedFault, ...]:
        """The faults that a seed decides, in the order of their beginnings. Pure."""
        draw, at_s, faults = random.Random(f"faults {seed}"), self.begin_s, []
        for _ in range(self.most):
            at_s += draw.expovariate(1.0 / self.every_s)
            (kind,) = draw.choices([*self.kinds], [*self.kinds.values()])
            lasts_s = draw.expovariate(1.0 / self.lasts_s)
            if draw.random() < self.for_good and kind in _OF_HOSTS:
                lasts_s = math.inf
            elif kind is FaultKind.PAUSE:
                lasts_s = min(lasts_s, _PAUSE_S)
            faults.append(PlannedFault(at_s, kind, lasts_s, draw.uniform(self.least_place, 1.0)))
        return tuple(faults)


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """One that was injected: its beginning, its kind, the actor or hosts that it hit, and its seconds."""

    at_s: float
    kind: FaultKind
    target: str
    lasts_s: float


class FaultInjector:
    """``planned``: the faults that are still to come; those that begin leave it. ``head``: the head's own node.
    ``injected``: gets those that have hit something. ``gone``: gets the names of the nodes that do not come back.
    ``disk``: the head's."""

    def __init__(
        self,
        planned: deque[PlannedFault],
        network: MemoryNetwork,
        head: MemoryNode,
        hosts: Sequence[SimulatedHost],
        injected: list[InjectedFault],
        gone: set[str],
        disk: SimulatedDisk,
    ) -> None:
        self._planned = planned
        self._network = network
        self._nodes = {node.name: node for node in (head, *(host.node for host in hosts))}
        self._hosts = {host.name: host for host in hosts}
        self._head = head.name
        self._injected = injected
        self._gone = gone
        self._disk = disk
        self._usual = network.faults

    async def run(self) -> None:
        """Runs until it is cancelled. Raises ActorDead when the head has lost its power."""
        time = asyncio.get_running_loop().time
        with first_error():
            await self._inject_all(time)

    async def _inject_all(self, time: Callable[[], float]) -> None:
        async with asyncio.TaskGroup() as group:
            while self._planned:
                await asyncio.sleep(max(0.0, self._planned[0].at_s - time()))
                planned = self._planned.popleft()
                if (target := choose(self._targets(planned.kind), planned.place)) is not None:
                    lasts_s = planned.lasts_s
                    if lasts_s == math.inf and target == self._head:  # without the head there is no run
                        lasts_s = 0.0
                    fault = InjectedFault(time(), planned.kind, target, lasts_s)
                    self._injected.append(fault)
                    if fault.kind is FaultKind.HEAD_POWER:
                        self._disk.lose_power()
                        self._nodes[target].power_off()
                        raise ActorDead(target, "it has lost its power")
                    group.create_task(self._inject(fault), name=f"{fault.kind} {fault.target}")
            await asyncio.Event().wait()  # until the run has ended

    def _targets(self, kind: FaultKind) -> list[list[str]]:
        """Those that can be hit now, in groups with equal shares of the places."""
        hosts = [name for name in self._nodes if self._network.reaches(self._head, name)]
        nodes = [host for host in hosts if host != self._head]
        match kind:
            case FaultKind.KILL | FaultKind.FREEZE:
                return self._actors(hosts, essential=False)
            case FaultKind.FATAL_KILL:
                return self._actors(hosts, essential=True)
            case FaultKind.PAUSE:
                return self._actors(hosts, essential=False) + self._actors(hosts, essential=True)
            case FaultKind.CUT:
                return [[" ".join(pair) for pair in combinations(hosts, 2)]]
            case FaultKind.CUT_NODES:
                return [[" ".join(pair) for pair in combinations(nodes, 2)]]
            case FaultKind.KILL_NODE | FaultKind.HOST_CRASH:
                return [nodes]
            case FaultKind.HEAD_POWER | FaultKind.FULL_DISK:
                return [[self._head]]
            case FaultKind.SLOW:
                return [[""]]
            case _:
                return [hosts]

    def _actors(self, hosts: Sequence[str], *, essential: bool) -> list[list[str]]:
        """Those that run, by their roles in alphabetic order. Those that are just being started do not yet."""
        running, roles = set(self._network.running), dict[str, list[str]]()
        for host in hosts:
            for actor in self._nodes[host].running:
                name = f"{host}/{actor}"
                if name in running and (actor in ESSENTIAL) is essential:
                    role = (
                        actor if essential else next((role for role in _ROLES if actor.startswith(role)), "")
                    )
                    roles.setdefault(role, []).append(name)
        return [roles[role] for role in sorted(roles)]

    async def _inject(self, fault: InjectedFault) -> None:
        host, _, actor = fault.target.partition("/")
        match fault.kind:
            case FaultKind.KILL | FaultKind.FATAL_KILL:
                self._nodes[host].kill(actor)
            case FaultKind.FREEZE | FaultKind.PAUSE:
                self._nodes[host].freeze(actor)
                await asyncio.sleep(fault.lasts_s)
                self._nodes[host].thaw(actor)
            case FaultKind.KILL_NODE:
                self._hosts[host].kill()
            case FaultKind.SLOW:
                self._network.faults = replace(self._usual, delay_s=(0.0, _SLOW_S))
                await asyncio.sleep(fault.lasts_s)
                self._network.faults = self._usual
            case FaultKind.FULL_DISK:
                self._disk.is_full = True
                try:
                    await asyncio.sleep(fault.lasts_s)
                finally:
                    self._disk.is_full = False
            case FaultKind.CUT | FaultKind.CUT_NODES | FaultKind.ISOLATE:
                await self._cut(fault)
            case FaultKind.FREEZE_HOST | FaultKind.HOST_CRASH:
                await self._stop_host(fault)

    async def _cut(self, fault: InjectedFault) -> None:
        hosts = fault.target.split()
        ends = hosts[1:] or [host for host in self._nodes if host != hosts[0]]
        for end in ends:
            self._network.cut(hosts[0], end)
        await self._pass(fault)
        for end in ends:
            self._network.mend(hosts[0], end)

    async def _stop_host(self, fault: InjectedFault) -> None:
        if fault.kind is FaultKind.HOST_CRASH:
            self._hosts[fault.target].power_off()
        self._network.pause_host(fault.target)
        await self._pass(fault)
        self._network.resume_host(fault.target)
        if fault.kind is FaultKind.HOST_CRASH:
            self._hosts[fault.target].power_on()

    async def _pass(self, fault: InjectedFault) -> None:
        """Waits until a fault has passed, which has just begun. Hosts that the head will not reach again are gone."""
        if fault.lasts_s == math.inf:
            self._gone |= {name for name in self._hosts if not self._network.reaches(self._head, name)}
            await asyncio.Event().wait()
        await asyncio.sleep(fault.lasts_s)


def choose(groups: Sequence[Sequence[str]], place: float) -> str | None:
    """The target at ``place`` in [0, 1), of which groups with targets have equal shares; None without targets. Pure."""
    groups = [group for group in groups if group]
    if not groups:
        return None
    number, rest = divmod(place * len(groups), 1.0)
    group = groups[int(number)]
    return group[int(rest * len(group))]
