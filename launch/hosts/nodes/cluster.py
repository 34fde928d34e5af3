"""The hosts of a run and the places of its actors, also after nodes were lost."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ....actors.run_events import ActorGivenUp, ActorMoved, NodeJoined, NodeLost, RunEvent
from ....core.errors import ActorDead
from ....core.supervision.node import Node
from .. import env
from ..host_description import HostDescription
from ..placement.place import place_again
from ..placement.run_placement import RunPlacement
from .head import Joined, Nodes


@dataclass
class Cluster:
    """``head_node``: the head's own node. ``placement``: of all actors, the head first. ``report``: gets the events.
    ``failure``: set when actors were given up without which the run can't continue."""

    head_node: Node
    nodes: Nodes
    placement: RunPlacement
    share_gpus: bool
    report: Callable[[RunEvent], None]
    failure: "asyncio.Future[ActorDead]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def __post_init__(self) -> None:
        self._places = dict(self.placement.plan.actors)
        self._given_up: set[str] = set()
        self.nodes.on_joined = self._report_joined
        self.nodes.on_lost = self._report_lost

    @property
    def placed(self) -> dict[str, Node]:
        """The node of each actor that is not on the head."""
        return {
            actor: self.nodes.joined[placed.node].node
            for actor, placed in self._places.items()
            if placed.node in self.nodes.joined
        }

    @property
    def hosts(self) -> dict[str, str]:
        """The name of the host of each actor."""
        return {actor: placed.node for actor, placed in self._places.items()}

    def another_node(self, actor: str, lost: ActorDead) -> tuple[Node, Mapping[str, str]] | None:
        """The next place of an actor whose node is lost, with the variables that name its devices; None: it is given
        up. An instance joins the router from any host; rollout workers and slots do not move, as other actors know
        their addresses."""
        need = self._places.pop(actor).need
        hosts = self._hosts()
        placed = None
        if not actor.startswith(("rollout-", "slot-")):
            head = self.placement.hosts[0].name
            placed = place_again(need, hosts, head, list(self._places.values()), share_gpus=self.share_gpus)
        if placed is None:
            self._give_up(actor, lost)
            return None
        self._places[actor] = placed
        self.report(ActorMoved(actor, placed.node, lost.reason))
        gpus = {host.name: host.gpus for host in hosts}[placed.node]
        devices = env.cuda_devices([gpus[number].uuid for number in placed.gpus]) if placed.gpus else {}
        joined = self.nodes.joined.get(placed.node)
        return (self.head_node if joined is None else joined.node), devices

    def _hosts(self) -> list[HostDescription]:
        """Those on which actors can be started: a node may be lost a moment before it leaves ``joined``."""
        joined_hosts = [joined.host for joined in self.nodes.joined.values() if joined.node.lost is None]
        return [self.placement.hosts[0], *joined_hosts]

    def _give_up(self, actor: str, lost: ActorDead) -> None:
        """Without its last rollout worker, or any of its slots, the run can't continue. The router knows if a policy
        has no instance left."""
        self.report(ActorGivenUp(actor, lost.reason))
        is_last_worker = actor.startswith("rollout-") and not any(
            name.startswith("rollout-") for name in self._places
        )
        if (is_last_worker or actor.startswith("slot-")) and not self.failure.done():
            self.failure.set_result(ActorDead(actor, lost.reason))

    def _report_joined(self, joined: Joined) -> None:
        self.report(NodeJoined(joined.node.name, joined.host.cores, len(joined.host.gpus)))

    def _report_lost(self, joined: Joined, lost: ActorDead) -> None:
        self.report(NodeLost(joined.node.name, lost.reason))
