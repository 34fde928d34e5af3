"""The hosts of a run and the places of its actors, also after nodes were lost."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ....actors.run_events import ActorGivenUp, ActorMoved, NodeJoined, NodeLost, RunEvent
from ....core.errors import ActorDead
from ....core.supervision.node import Node
from .. import env
from ..host_description import HostDescription
from ..placement.place import place_again
from ..placement.plan import Need
from ..placement.run_placement import RunPlacement
from .head import Joined, Nodes


@dataclass
class Cluster:
    """``head_node``: the head's own node. ``placement``: of all actors, the head first. ``fewest_slots``: without which
    the run can't continue. ``report``: gets the events. ``failure``: set when actors were given up without which it
    can't either. ``take_up``: starts an actor again that was given up."""

    head_node: Node
    nodes: Nodes
    placement: RunPlacement
    share_gpus: bool
    fewest_slots: int
    report: Callable[[RunEvent], None]
    failure: "asyncio.Future[ActorDead]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    take_up: Callable[[str, ActorDead, Node, Mapping[str, str]], None] = lambda actor, lost, node, env: None

    def __post_init__(self) -> None:
        self._places = dict(self.placement.plan.actors)
        self._absent: dict[str, tuple[Need, ActorDead]] = {}
        """Slots that were given up."""
        self.nodes.on_joined = self._node_joined
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
        up. An instance joins the router from any host, and the trainer asks for the addresses of its slots; rollout
        workers and reward services do not move, as other actors know their addresses."""
        need = self._places.pop(actor).need
        place = None if actor.startswith(_NOT_MOVED) else self._place_again(need, lost)
        if place is None:
            self._give_up(need, lost)
        return place

    def _place_again(self, need: Need, lost: ActorDead) -> tuple[Node, Mapping[str, str]] | None:
        hosts = self._hosts()
        placed = place_again(
            need,
            hosts,
            self.placement.hosts[0].name,
            list(self._places.values()),
            share_gpus=self.share_gpus,
            alone=_is_slot(need.actor),  # a training state takes the memory of a whole GPU
        )
        if placed is None:
            return None
        self._places[need.actor] = placed
        self.report(ActorMoved(need.actor, placed.node, lost.reason))
        gpus = {host.name: host.gpus for host in hosts}[placed.node]
        devices = env.cuda_devices([gpus[number].uuid for number in placed.gpus]) if placed.gpus else {}
        joined = self.nodes.joined.get(placed.node)
        return (self.head_node if joined is None else joined.node), devices

    def _hosts(self) -> list[HostDescription]:
        """Those on which actors can be started: a node may be lost a moment before it leaves ``joined``."""
        joined_hosts = [joined.host for joined in self.nodes.joined.values() if joined.node.lost is None]
        return [self.placement.hosts[0], *joined_hosts]

    def _give_up(self, need: Need, lost: ActorDead) -> None:
        """Without its last rollout worker, or with too few slots, the run can't continue. The router knows if a policy
        has no instance left."""
        actor = need.actor
        self.report(ActorGivenUp(actor, lost.reason))
        if _is_slot(actor):
            self._absent[actor] = need, lost
            ends = sum(map(_is_slot, self._places)) < self.fewest_slots
        else:
            ends = actor.startswith("rollout-") and not any(
                name.startswith("rollout-") for name in self._places
            )
        if ends and not self.failure.done():
            self.failure.set_result(ActorDead(actor, lost.reason))

    def _node_joined(self, joined: Joined) -> None:
        """Its slots are there again if they have room, perhaps on another host than before."""
        self.report(NodeJoined(joined.node.name, joined.host.cores, len(joined.host.gpus)))
        for actor, (need, lost) in list(self._absent.items()):
            if (place := self._place_again(need, lost)) is not None:
                del self._absent[actor]
                self.take_up(actor, lost, *place)

    def _report_lost(self, joined: Joined, lost: ActorDead) -> None:
        self.report(NodeLost(joined.node.name, lost.reason))


_NOT_MOVED: Final = ("rollout-", "rewards-")


def _is_slot(actor: str) -> bool:
    return actor.startswith("slot-")
