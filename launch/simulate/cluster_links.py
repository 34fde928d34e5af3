"""The links of a cluster: their ports, and the way of each transfer of a run over them.

    device ── device port ──> host's memory ── host's port ── switch ── host's port ──> host's memory
               each its own     copies_gb_s      network_gb_s  switch_gb_s

Each port has two directions, which do not share their bandwidth. Published weights lie in the trainer's memory, on the
head, and a rank's state in that of the host on which it was suspended (``actors/trainer/pool/host_memory.py``): a slot
or an instance on another host crosses the network to it. Sizes with P parameters of b bytes, of a policy on R ranks:

    weights     b P         from the first rank, once a version; to each instance, divided over its devices: across the
                            network once for all instances of a host, from the head to the first host and from there
                            to the next (``transport/remote/relays.py``)
    rest        12 P / R    float32 weights and two moments, from each rank after an optimizer step and to it
    gradients    4 P / R    from each rank that is suspended within a step, and back to it
    second      12 and 4    of both, from a host other than the head to another host, beside all others

A simulated state has ``STATE_ROWS`` rows in each part: a transfer has as much of the part as it has of these, also to
another number of ranks. It moves in pieces, so that it is as fast as the narrowest port on its way, and not the sum of
all.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ...actors.model_shape import ModelShape
from ...actors.names import PolicyName
from ...actors.trainer.backends.simulated_policy import STATE_ROWS
from ...core.pacing import Pacing
from ...core.testing.link_clock import LinkClock
from ...transport.remote.relays import Chain
from ..hosts.placement.plan import Need, Placed, Plan
from .cluster_config import ClusterConfig

_GIGA: Final = 1e9
_SWITCH: Final = "switch"

Direction = Literal["out", "in"]
"""A direction of a port: of a device to its host's memory or from there, of a host to the switch or from there."""


MoveKind = Literal["suspend", "resume", "copy", "publish", "install", "second"]
"""``copy``: of the state after an optimizer step, beside the next computations. ``second``: of a state, from one host
to another."""

_KINDS: Final[Mapping[tuple[str, str], MoveKind]] = {
    ("set", "step"): "suspend", ("get", "step"): "resume", ("get", "rest"): "resume", ("set", "rest"): "copy",
    ("set", ""): "publish", ("get", ""): "install",
}  # fmt: skip
"""By operation and part of a state."""


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer that has ended. ``version``: of the state. Times: of the loop."""

    kind: MoveKind
    policy: PolicyName
    version: int
    begin_s: float
    end_s: float


@dataclass(eq=False, slots=True)
class _HostCopy:
    """Weights that a process of ``host`` fetches for all others there. ``ended`` is set when they are whole there, or
    when the fetch has failed."""

    host: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes of a policy: of its weights as they are published, and of the parts of its state, on all ranks together."""

    weights: float
    rest: float
    gradients: float

    @classmethod
    def of(cls, shape: ModelShape, item_bytes: int) -> "StateSizes":
        """``item_bytes``: of a published weight."""
        return cls(item_bytes * shape.parameters, 12.0 * shape.parameters, 4.0 * shape.parameters)

    def moved(self, part: str, simulated_bytes: int) -> float:
        """Bytes of a transfer that moves ``simulated_bytes`` of a simulated state. ``part``: as the slots name it;
        empty for weights, which move as a whole."""
        if not part:
            return self.weights
        return {"rest": self.rest, "step": self.gradients}[part] * simulated_bytes / STATE_ROWS


def ports_of(cluster: ClusterConfig, hosts: int) -> dict[str, float]:
    """Bytes a second of each port of ``hosts`` hosts."""
    share = cluster.device.link_share * _GIGA
    ports: dict[str, float] = {}
    if cluster.switch_gb_s is not None:
        ports[_SWITCH] = cluster.switch_gb_s * share
    directions: tuple[Direction, ...] = ("out", "in")
    for direction in directions:
        for number in range(hosts):
            host = f"host-{number}"
            ports[f"{host} {direction}"] = cluster.network_gb_s * share
            if cluster.copies_gb_s is not None:
                ports[f"{host} memory {direction}"] = cluster.copies_gb_s * _GIGA
            for device in range(cluster.devices):
                ports[f"{host} device {device} {direction}"] = cluster.device.host_gb_s * share
    return ports


class ClusterLinks:
    """The links of a simulated run. ``plan``: the place of each actor on the cluster. For one loop."""

    def __init__(
        self, cluster: ClusterConfig, hosts: int, plan: Plan, sizes: Mapping[PolicyName, StateSizes]
    ) -> None:
        self._cluster = cluster
        self._places = plan.actors
        self._sizes = sizes
        self._head = plan.actors["trainer"].node
        self._bytes_s = ports_of(cluster, hosts)
        self._clock = LinkClock(self._bytes_s)
        self.moves: list[Move] = []
        """All transfers, in the order of their ends."""
        self._host_of: dict[str, str] = {}
        """The host of each process's memory."""
        self._host_copies: dict[tuple[str, PolicyName, int], _HostCopy] = {}
        self._chains: dict[tuple[PolicyName, int], Chain[_HostCopy]] = {}
        """By policy and version."""
        self._published: dict[str, int] = {}
        """The newest version of each policy whose weights have left a first rank."""

    def of(self, actor: str) -> Pacing | None:
        """The links of an actor; None if the plan does not have it."""
        place = self._places.get(actor)
        return None if place is None else _ActorLinks(self, place)

    def of_node(self, host: str) -> Pacing:
        """The links of a node's own process, which lends the memory of its host."""
        return _ActorLinks(self, Placed(host, Need(host, "")))

    def placement(self, needs: Sequence[Need]) -> Plan:
        """The plan's hosts for actors that need no devices, as simulated ones do."""
        return Plan({need.actor: Placed(self._places[need.actor].node, need) for need in needs})

    def busy_ports(self, seconds: float) -> dict[str, float]:
        """The part of its bandwidth that each port has used in ``seconds``, the busiest first."""
        carried = self._clock.carried_bytes
        used = {port: carried[port] / (bytes_s * seconds) for port, bytes_s in self._bytes_s.items()}
        return dict(sorted(used.items(), key=lambda item: -item[1]))

    def opened(self, place: Placed, memory: str) -> None:
        """``memory`` is that of a process at ``place``."""
        self._host_of[memory] = place.node

    async def move(
        self,
        place: Placed,
        operation: Literal["set", "get"],
        key: str,
        version: int,
        size_bytes: int,
        memory: str,
    ) -> None:
        """Takes the time of a transfer between an actor's devices, or the memory of its host, and ``memory``. See
        ``Pacing``."""
        name, _, part = key.partition("/")
        policy = PolicyName(name)
        sizes, kind = self._sizes.get(policy), _KINDS.get((operation, part))
        if (
            sizes is None
            or kind is None
            or (operation == "set" and not part and not self._is_first(key, version))
        ):
            return
        if part and not place.gpus:  # of a host's memory, not of a slot
            kind = "second"
        host = self._host_of.get(memory, self._head)
        time = asyncio.get_running_loop().time
        begin_s = time()
        moved_bytes = sizes.moved(part, size_bytes)
        if kind == "install" and place.node != host:
            await self._install_from_network(place, policy, version, moved_bytes, host)
        else:
            await self._transfer(place, operation, moved_bytes, host)
        self.moves.append(Move(kind, policy, version, begin_s, time()))

    async def _install_from_network(
        self, place: Placed, policy: PolicyName, version: int, size_bytes: float, owner: str
    ) -> None:
        """Weights of the host ``owner``: the first process of a host fetches them, and the others read its copy."""
        key = place.node, policy, version
        while (copy := self._host_copies.get(key)) is not None:
            await copy.ended.wait()
            if self._host_copies.get(key) is copy:  # else its fetch has failed
                await self._transfer(place, "get", size_bytes, place.node)
                return
        copy = self._host_copies[key] = _HostCopy(place.node)
        chain = self._chains.setdefault((policy, version), Chain())
        relay = chain.join(copy)
        try:
            await self._transfer(place, "get", size_bytes, owner if relay is None else relay.host)
            if relay is not None:  # it passes on the bytes that it has, and no others
                await relay.ended.wait()
        except BaseException:
            chain.leave(copy)
            del self._host_copies[key]
            raise
        finally:
            copy.ended.set()

    async def _transfer(
        self, place: Placed, operation: Literal["set", "get"], size_bytes: float, host: str
    ) -> None:
        latency_s = self._cluster.network_latency_s if place.node != host else 0.0
        await self._clock.transfer(size_bytes, self._way(place, operation, host), latency_s)

    def _is_first(self, policy: str, version: int) -> bool:
        """The first rank has the whole weights, and is the first to be asked for them."""
        is_first = self._published.get(policy) != version
        self._published[policy] = version
        return is_first

    def _way(self, place: Placed, operation: Literal["set", "get"], host: str) -> dict[str, float]:
        """The ports to the memory of ``host`` or from there, with the part of the bytes that crosses each."""
        direction: Direction = "out" if operation == "set" else "in"
        ways = {f"{place.node} device {device} {direction}": 1.0 / len(place.gpus) for device in place.gpus}
        if place.gpus and self._cluster.copies_gb_s is not None:
            ways[f"{place.node} memory {direction}"] = 1.0
        if place.node != host:
            source, target = (place.node, host) if operation == "set" else (host, place.node)
            ways |= {f"{source} out": 1.0, f"{target} in": 1.0}
            if self._cluster.switch_gb_s is not None:
                ways[_SWITCH] = 1.0
        return ways


@dataclass(frozen=True, slots=True)
class _ActorLinks:
    links: ClusterLinks
    place: Placed

    def opened(self, memory: str) -> None:
        """See ``Pacing``."""
        self.links.opened(self.place, memory)

    async def pace(
        self, operation: Literal["set", "get"], key: str, version: int, size_bytes: int, memory: str
    ) -> None:
        """See ``Pacing``."""
        await self.links.move(self.place, operation, key, version, size_bytes, memory)
