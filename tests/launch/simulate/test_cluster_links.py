"""The ways of a run's transfers over the links of a cluster, with times computed by hand."""

import asyncio
from collections.abc import Sequence
from typing import Literal

import pytest

from flexmarl.actors.names import PolicyName
from flexmarl.actors.trainer.backends.simulated_policy import STATE_ROWS
from flexmarl.core.pacing import Pacing
from flexmarl.core.testing import virtual_time
from flexmarl.launch.hosts.placement.plan import Need, Placed, Plan
from flexmarl.launch.simulate.cluster_config import ClusterConfig
from flexmarl.launch.simulate.cluster_links import ClusterLinks, StateSizes

from .shapes import QWEN_14B

GB = 10**9
Transfer = tuple[str, Literal["set", "get"], str, str]
"""Actor, operation, key, and the host of the memory."""
DEVICE = {
    "tflops": 100, "memory_gib": 80, "memory_gb_s": 1000, "link_gb_s": 100, "host_gb_s": 20, "link_share": 1.0,
}  # fmt: skip
PLAN = Plan({
    "trainer": Placed("host-0", Need("trainer", "")),
    "slot-0": Placed("host-0", Need("slot-0", ""), (0,)),
    "slot-1": Placed("host-1", Need("slot-1", ""), (0,)),
    "slot-2": Placed("host-1", Need("slot-2", ""), (1,)),
    "a-0": Placed("host-1", Need("a-0", ""), (2, 3)),
    "a-1": Placed("host-2", Need("a-1", ""), (0, 1)),
    "a-2": Placed("host-2", Need("a-2", ""), (2, 3)),
})  # fmt: skip
SIZES = {PolicyName("a"): StateSizes(weights=40 * GB, rest=60 * GB, gradients=20 * GB)}


def ends(transfers: Sequence[Transfer], **cluster: float) -> list[float]:
    """Seconds from their common begin to the end of each."""
    settings = {"hosts": 3, "devices": 4, "device": DEVICE, "network_gb_s": 10, "network_latency_s": 0.5}
    config = ClusterConfig.model_validate({**settings, **cluster})

    async def main() -> list[float]:
        links, loop = ClusterLinks(config, 3, PLAN, SIZES), asyncio.get_running_loop()

        for host in ("host-0", "host-1", "host-2"):
            links.of_node(host).opened(f"memory of {host}")

        async def move(actor: str, operation: Literal["set", "get"], key: str, host: str) -> float:
            end = links.of_node(actor) if actor.startswith("host-") else links.of(actor)
            assert end is not None
            await end.pace(operation, key, 1, STATE_ROWS, f"memory of {host}")
            return loop.time()

        return await asyncio.gather(*(move(*transfer) for transfer in transfers))

    return virtual_time.run(main())


def test_a_slot_of_the_head_moves_over_its_device_and_one_of_another_host_over_the_network() -> None:
    assert ends([("slot-0", "get", "a/rest", "host-0")]) == pytest.approx([60 / 20])
    assert ends([("slot-1", "get", "a/rest", "host-0")]) == pytest.approx([60 / 10 + 0.5])
    assert ends([("slot-1", "set", "a/step", "host-0")]) == pytest.approx([20 / 10 + 0.5])


def test_a_slot_crosses_the_network_only_to_the_memory_of_another_host() -> None:
    assert ends([("slot-1", "set", "a/rest", "host-1")]) == pytest.approx([60 / 20])
    assert ends([("slot-1", "get", "a/rest", "host-2")]) == pytest.approx([60 / 10 + 0.5])
    assert ends([("slot-0", "get", "a/rest", "host-1")]) == pytest.approx([60 / 10 + 0.5])
    apart = ends([("slot-0", "set", "a/rest", "host-0"), ("slot-1", "set", "a/rest", "host-1")])
    assert apart == pytest.approx([3.0, 3.0]), "they share no port"


def test_a_second_copy_crosses_the_network_alone_and_counts_as_no_move_of_a_slot() -> None:
    assert ends([("host-2", "get", "a/rest", "host-1")]) == pytest.approx([60 / 10 + 0.5])
    both = ends([("host-2", "get", "a/rest", "host-1"), ("slot-1", "set", "a/rest", "host-1")])
    assert both == pytest.approx([6.5, 3.0])


def test_transfers_from_the_head_share_its_port_and_those_of_the_other_direction_do_not() -> None:
    both = ends([("slot-1", "get", "a/rest", "host-0"), ("a-1", "get", "a", "host-0")])
    assert both == pytest.approx([(40 + 60) / 10 + 0.5, 80 / 10 + 0.5]), "40 of each until the shorter ends"
    assert ends(
        [("slot-1", "get", "a/rest", "host-0"), ("slot-2", "set", "a/rest", "host-0")]
    ) == pytest.approx([6.5, 6.5])


def test_an_instance_divides_the_weights_over_its_devices() -> None:
    assert ends([("a-1", "get", "a", "host-0")], network_gb_s=1000) == pytest.approx([40 / 2 / 20 + 0.5])


def test_the_devices_of_a_host_share_the_way_to_its_memory() -> None:
    alone = ends([("slot-1", "get", "a/rest", "host-0")], network_gb_s=1000, copies_gb_s=30)
    assert alone == pytest.approx([60 / 20 + 0.5])
    both = ends(
        [("slot-1", "get", "a/rest", "host-0"), ("slot-2", "get", "a/rest", "host-0")],
        network_gb_s=1000,
        copies_gb_s=30,
    )
    assert both == pytest.approx([120 / 30 + 0.5] * 2)


def test_a_switch_that_blocks_is_shared_by_all_hosts() -> None:
    moves: list[Transfer] = [("slot-1", "get", "a/rest", "host-0"), ("slot-2", "set", "a/rest", "host-0")]
    assert ends(moves, switch_gb_s=15) == pytest.approx([120 / 15 + 0.5] * 2)
    assert ends([("slot-0", "get", "a/rest", "host-0")], switch_gb_s=1) == pytest.approx([3.0])


def test_the_first_rank_sends_the_weights_for_all() -> None:
    assert ends([("slot-0", "set", "a", "host-0"), ("slot-1", "set", "a", "host-0")]) == pytest.approx(
        [40 / 20, 0.0]
    )


def test_keys_and_actors_that_the_cluster_does_not_have_take_no_time() -> None:
    assert ends([("slot-1", "get", "other/rest", "host-0"), ("slot-1", "get", "a/unknown", "host-0")]) == [
        0.0,
        0.0,
    ]
    config = ClusterConfig.model_validate({"hosts": 3, "devices": 4, "device": DEVICE})
    assert ClusterLinks(config, 3, PLAN, SIZES).of("rollout-9") is None


def test_sizes_of_a_state() -> None:
    sizes = StateSizes.of(QWEN_14B, item_bytes=2)
    assert sizes.moved("", 16) == 2 * QWEN_14B.parameters, "weights move as a whole"
    of_one_of_16 = STATE_ROWS // 16
    assert sizes.moved("rest", of_one_of_16) == 12 * QWEN_14B.parameters / 16
    assert sizes.moved("step", of_one_of_16) == 4 * QWEN_14B.parameters / 16


def test_weights_cross_the_network_once_for_all_instances_of_a_host() -> None:
    """The second one reads the copy of the host, over its own devices: 2 x 20 GB/s."""
    first, second = ends([("a-1", "get", "a", "host-0"), ("a-2", "get", "a", "host-0")])
    assert (first, second) == pytest.approx((40 / 10 + 0.5, 4.5 + 40 / 2 / 20))


def test_a_host_passes_weights_on_to_the_next_as_they_arrive() -> None:
    """Both hosts have them after the time of one: the head's port carries them once, and not twice in 8 s."""
    moves: list[Transfer] = [("a-0", "get", "a", "host-0"), ("a-1", "get", "a", "host-0")]
    assert ends(moves) == pytest.approx([40 / 10 + 0.5] * 2)
    slower = ends([*moves, ("slot-1", "get", "a/rest", "host-0")])
    assert slower == pytest.approx([8.5, 8.5, 10.5]), "the second has no byte before the first"


def test_a_host_whose_fetch_has_failed_is_no_source_and_fetches_again() -> None:
    async def main() -> tuple[float, float]:
        settings = {"hosts": 3, "devices": 4, "device": DEVICE, "network_gb_s": 10, "network_latency_s": 0.5}
        links = ClusterLinks(ClusterConfig.model_validate(settings), 3, PLAN, SIZES)
        links.of_node("host-0").opened("memory")
        first, neighbour, other = (links.of(name) for name in ("a-1", "a-2", "a-0"))
        assert first is not None
        assert neighbour is not None
        assert other is not None
        loop = asyncio.get_running_loop()

        async def install(end: Pacing) -> float:
            await end.pace("get", "a", 1, 16, "memory")
            return loop.time()

        failing = asyncio.create_task(install(first))
        waiting = asyncio.create_task(install(neighbour))
        await asyncio.sleep(1.0)
        failing.cancel()
        await asyncio.wait([failing])
        return await waiting, await install(other)

    assert virtual_time.run(main()) == pytest.approx((1 + 40 / 10 + 0.5, 5.5 + 40 / 10 + 0.5))
