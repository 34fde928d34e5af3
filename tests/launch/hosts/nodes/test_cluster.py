"""The places of actors after their node was lost."""

import asyncio
from typing import Any, cast

from flexmarl.actors.run_events import ActorGivenUp, ActorMoved, NodeJoined, NodeLost, RunEvent
from flexmarl.core.errors import ActorDead
from flexmarl.core.protocol.session import DEFAULT_SETTINGS
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.node import Node
from flexmarl.core.supervision.remote_node import RemoteNode
from flexmarl.launch.hosts.host_description import HostDescription
from flexmarl.launch.hosts.nodes.cluster import Cluster
from flexmarl.launch.hosts.nodes.head import Joined, Nodes
from flexmarl.launch.hosts.nodes.joining import Head, Offer
from flexmarl.launch.hosts.placement.place import place
from flexmarl.launch.hosts.placement.plan import Need
from flexmarl.launch.hosts.placement.run_placement import RunPlacement

from ..placement.hosts import host, instances, slots

LOST = ActorDead("node", "node b is lost: silent")


class Hosts:
    """A cluster of hosts without processes. ``here``: a stand-in for the head's own node. ``again``: the places of
    actors that were given up, once there are some."""

    def __init__(self, needs: list[Need], *hosts: HostDescription, fewest_slots: int = 1) -> None:
        self.events: list[RunEvent] = []
        self.here = cast(Node, object())
        self.nodes = Nodes(Head(hosts[0], Offer("", "", DEFAULT_SETTINGS, {}), {}, ""))
        for other in hosts[1:]:
            self.join(other)
        placement = RunPlacement(hosts, place(needs, hosts, hosts[0].name))
        self.cluster = Cluster(self.here, self.nodes, placement, False, fewest_slots, self.events.append)
        self.again: list[tuple[str, str, dict[str, str]]] = []
        self.cluster.take_up = lambda actor, lost, node, env: self.again.append((actor, node.name, dict(env)))

    def join(self, description: HostDescription) -> Joined:
        ref: ActorRef[Any] = ActorRef("node", f"tcp://{description.name}:1")
        dismissed = asyncio.get_running_loop().create_future()
        joined = Joined(RemoteNode(description.name, ref), description, dismissed)
        self.nodes.joined[description.name] = joined
        return joined

    def lose(self, name: str) -> list[str]:
        """Returns the actors that were on it."""
        lost = [actor for actor, node in self.cluster.placed.items() if node.name == name]
        self.nodes.on_lost(self.nodes.joined.pop(name), LOST)
        return lost


async def test_instances_move_to_free_gpus_and_see_these_alone() -> None:
    made = Hosts(instances(5), host("head", 1), host("b", 2), host("c", 4))
    lost = made.lose("b")
    assert lost and made.events == [NodeLost("b", LOST.reason)]
    seen = [node for actor, node in made.cluster.placed.items()]
    for actor in lost:
        node, variables = made.cluster.another_node(actor, LOST) or (None, {})
        name = "head" if node is made.here else cast(RemoteNode, node).name
        assert variables["CUDA_VISIBLE_DEVICES"].startswith(f"GPU-{name}-")
    assert len(made.cluster.placed) >= len(seen)


async def test_each_gpu_is_given_once_and_actors_beyond_them_are_given_up() -> None:
    made = Hosts(instances(5), host("head", 1), host("b", 2), host("c", 2))
    lost = made.lose("b")
    assert len(lost) == 2
    assert [made.cluster.another_node(actor, LOST) for actor in lost] == [None, None]
    assert made.events[1:] == [ActorGivenUp(actor, LOST.reason) for actor in lost]
    assert not set(lost) & set(made.cluster.hosts)
    assert not made.cluster.failure.done(), "the router knows if a policy has no instance left"
    made.nodes.on_joined(made.join(host("d", 2)))
    assert made.events[-1] == NodeJoined("d", 16, 2)
    places = [made.cluster.another_node(actor, LOST) for actor in made.lose("c")]
    assert {place[0].name for place in places if place} == {"d"}
    assert {place[1]["CUDA_VISIBLE_DEVICES"] for place in places if place} == {"GPU-d-0", "GPU-d-1"}


async def test_without_gpus_they_move_to_the_head() -> None:
    made = Hosts(instances(4, gpus=0), host("head"), host("b"))
    lost = made.lose("b")
    assert lost
    for actor in lost:
        assert made.cluster.another_node(actor, LOST) == (made.here, {})
        assert made.events[-1] == ActorMoved(actor, "head", LOST.reason)
        assert made.cluster.hosts[actor] == "head"


async def test_nothing_moves_to_a_node_that_is_lost_and_has_not_left_yet() -> None:
    made = Hosts(instances(3), host("head", 1), host("b", 1), host("c", 1))
    (moved,) = made.lose("b")
    late = made.join(host("d", 4))
    late.node._lose("silent")
    assert made.cluster.another_node(moved, LOST) is None


async def test_a_slot_moves_to_a_gpu_without_an_instance_or_is_given_up_until_a_node_joins() -> None:
    made = Hosts([*instances(1), *slots(3)], host("head", 2), host("b", 1), host("c", 1))
    assert made.cluster.hosts == {"a-0": "b", "slot-0": "head", "slot-1": "head", "slot-2": "c"}
    made.lose("c")
    assert made.cluster.another_node("slot-2", LOST) is None, "instances keep their GPUs"
    made.nodes.on_joined(made.join(host("tiny")))
    assert not made.again and not made.cluster.failure.done()
    made.nodes.on_joined(made.join(host("d", 1)))
    assert made.again == [("slot-2", "d", {"CUDA_VISIBLE_DEVICES": "GPU-d-0"})]
    assert made.cluster.hosts["slot-2"] == "d"
    made.nodes.on_joined(made.join(host("e", 1)))
    assert made.lose("d") == ["slot-2"] and made.cluster.another_node("slot-2", LOST) is not None
    made.nodes.on_joined(made.join(host("f", 1)))
    assert len(made.again) == 1, "no slot is absent"
    assert made.events[1:] == [
        ActorGivenUp("slot-2", LOST.reason),
        NodeJoined("tiny", 16, 0),
        NodeJoined("d", 16, 1),
        ActorMoved("slot-2", "d", LOST.reason),
        NodeJoined("e", 16, 1),
        NodeLost("d", LOST.reason),
        ActorMoved("slot-2", "e", LOST.reason),
        NodeJoined("f", 16, 1),
    ]


async def test_too_few_slots_for_a_policy_end_the_run() -> None:
    made = Hosts(slots(3), host("head", 1), host("b", 1), host("c", 1), fewest_slots=2)
    made.lose("b")
    assert made.cluster.another_node("slot-1", LOST) is None and not made.cluster.failure.done()
    made.lose("c")
    assert made.cluster.another_node("slot-2", LOST) is None
    assert made.cluster.failure.result().actor == "slot-2"


async def test_the_last_worker_ends_the_run() -> None:
    workers = [Need(f"rollout-{n}", "rollout.workers=2") for n in range(2)]
    made = Hosts([Need("store", "store", on_head=True), *workers], host("head", cores=1), host("b", cores=64))
    first, second = made.lose("b")
    assert made.cluster.another_node(first, LOST) is None and not made.cluster.failure.done()
    assert made.cluster.another_node(second, LOST) is None
    assert made.cluster.failure.result().actor == second
