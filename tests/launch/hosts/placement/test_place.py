"""Placement: rules that hold for every plan, spreading, gangs, shared GPUs."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.launch.hosts.host_description import Gpu, HostDescription
from flexmarl.launch.hosts.placement.place import place
from flexmarl.launch.hosts.placement.plan import DoesNotFit, Need, Plan

from .hosts import GIB, check_plan, host, instances, slots, trainer


def nodes(plan: Plan, prefix: str) -> list[str]:
    return [placed.node for actor, placed in plan.actors.items() if actor.startswith(prefix)]


def fits(needs: list[Need], hosts: list[HostDescription]) -> Plan | None:
    try:
        return place(needs, hosts, "node00")
    except DoesNotFit as refused:
        assert refused.problems
        return None


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[HostDescription], list[Need]]:
    sizes = draw(st.lists(st.integers(0, 8), min_size=1, max_size=5))
    hosts = [
        host(
            f"node{n:02}", gpus, cores=draw(st.integers(1, 8)), memory=draw(st.integers(8, 64)) * GIB,
            gpu_bytes=draw(st.sampled_from([40, 80])) * GIB,
        )
        for n, gpus in enumerate(sizes)
    ]  # fmt: skip
    needs = [trainer(draw(st.integers(0, 1)))]
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    needs += slots(draw(st.integers(0, 6)), ranks)
    for policy in "ab":
        count, gpus = draw(st.integers(0, 6)), draw(st.sampled_from([0, 1, 1, 2, 3, 4]))
        needs += instances(
            count, gpus, policy, gpu_bytes=draw(st.sampled_from([0, 30, 60])) * GIB * (gpus > 0)
        )
    needs += [Need(f"cpu-{n}", "c", memory_bytes=4 * GIB) for n in range(draw(st.integers(0, 6)))]
    return hosts, needs


@settings(max_examples=150)
@given(clusters(), st.randoms(use_true_random=False))
def test_every_plan_keeps_the_rules_and_the_order_of_hosts_changes_nothing(
    cluster: tuple[list[HostDescription], list[Need]], chance: random.Random
) -> None:
    hosts, needs = cluster
    plan = fits(needs, hosts)
    other_order = chance.sample(hosts, len(hosts))
    assert fits(needs, other_order) == plan
    if plan is not None:
        shared = check_plan(plan, needs, hosts, "node00")
        assert shared == any("share GPU" in note for note in plan.notes)


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=4),
    st.lists(st.sampled_from([1, 2, 4]), max_size=10),
)
def test_sizes_that_divide_each_other_fit_if_there_is_a_way(sizes: list[int], wanted: list[int]) -> None:
    """Counted by the largest size first: each host has room for its GPUs // size."""
    needs = [need for n, size in enumerate(wanted) for need in instances(1, size, f"p{n}")]
    plan = fits(needs, [host(f"node{n:02}", gpus) for n, gpus in enumerate(sizes)])
    assert (plan is not None) == _there_is_a_way(sizes, wanted)


def _there_is_a_way(sizes: list[int], wanted: list[int]) -> bool:
    for size in (4, 2, 1):
        needed = sum(each for each in wanted if each >= size)
        if needed > sum(gpus // size * size for gpus in sizes):
            return False
    return True


def test_sizes_that_don_t_divide_each_other_are_tried_in_other_orders() -> None:
    """The even spread puts the first instance on the smaller host, and has no room for the last one."""
    hosts = [host("node00", 4), host("node01", 5)]
    needs = [*instances(1, 3, "a"), *instances(3, 2, "b")]
    plan = place(needs, hosts, "node00")
    check_plan(plan, needs, hosts, "node00")
    assert plan.actors["a-0"].node == "node01"


def test_instances_are_spread_evenly_by_gpus() -> None:
    hosts = [host("node00", 8), host("node01", 4), host("node02", 4)]
    plan = place([*instances(4), *instances(4, policy="b")], hosts, "node00")
    assert Counter(nodes(plan, "")) == {"node00": 4, "node01": 2, "node02": 2}
    assert Counter(nodes(plan, "a")) == {"node00": 2, "node01": 1, "node02": 1}


def test_64_nodes_with_512_instances_are_filled() -> None:
    hosts = [host(f"node{n:02}", 8, cores=64) for n in range(64)]
    needs = [trainer(), *instances(512)]
    plan = place(needs, hosts, "node00")
    assert not check_plan(plan, needs, hosts, "node00")
    assert set(Counter(nodes(plan, "a")).values()) == {8}


def test_the_head_has_its_actors_and_others_are_spread_by_cores() -> None:
    head = [Need(name, name, on_head=True) for name in ("store", "router", "orchestrator", "trainer")]
    workers = [Need(f"rollout-{n}", "rollout.workers=8") for n in range(8)]
    hosts = [host("a", cores=4), host("head", cores=4), host("z", cores=8)]
    plan = place([*head, *workers], hosts, "head")
    assert {plan.actors[need.actor].node for need in head} == {"head"}
    assert Counter(nodes(plan, "rollout")) == {"a": 3, "z": 5}


def test_a_gang_is_on_one_host_if_it_fits_there() -> None:
    hosts = [host("node00", 2), host("node01", 8)]
    plan = place([*instances(2, 2), *slots(4, ranks=4)], hosts, "node00")
    assert set(nodes(plan, "slot")) == {"node01"}
    assert not any("several hosts" in note for note in plan.notes)


def test_gangs_fill_the_head_first() -> None:
    plan = place(slots(4, ranks=2), [host("a", 4), host("head", 4)], "head")
    assert nodes(plan, "slot") == ["head"] * 4


def test_a_gang_that_no_host_has_room_for_is_divided() -> None:
    hosts = [host("node00", 4), host("node01", 4), host("node02", 4)]
    plan = place(slots(8, ranks=8), hosts, "node00")
    assert Counter(nodes(plan, "slot")) == {"node00": 4, "node01": 4}
    assert "the ranks of a policy may be on several hosts" in plan.notes[0]


def test_training_and_generation_share_gpus_only_if_there_are_too_few() -> None:
    two, three = [host("node00", 2)], [host("node00", 3)]
    needs = [trainer(1), *instances(2)]
    assert not check_plan(place(needs, three, "node00"), needs, three, "node00")
    plan = place(needs, two, "node00")
    assert check_plan(plan, needs, two, "node00")
    assert plan.notes[0] == "training and generation share GPU 0 of node00: there are too few for each alone"


def test_a_gpu_that_is_shared_has_the_memory_for_both() -> None:
    needs = [trainer(1), *instances(1, gpu_bytes=60 * GIB)]
    large = [Need("trainer", "t", on_head=True, purpose="training", gpus=1, gpu_bytes=30 * GIB), *needs[1:]]
    assert fits(needs, [host("node00", 1)]) and fits(large, [host("node00", 2)])
    assert fits(large, [host("node00", 1)]) is None


def test_gpus_that_others_use_are_left_out() -> None:
    plan = place(instances(2), [host("node00", 4, used=(0, 2))], "node00")
    assert [placed.gpus for placed in plan.actors.values()] == [(1,), (3,)]
    assert "GPU 0 of node00 is used by process 4711 python of ada, 30.0 GiB" in plan.notes


def test_gpus_that_others_use_may_be_shared_and_have_the_memory_that_is_free() -> None:
    hosts = [host("node00", 2, used=(0,))]
    small, large = instances(2, gpu_bytes=50 * GIB), instances(2, gpu_bytes=51 * GIB)
    plan = place(small, hosts, "node00", share_gpus=True)
    assert sorted(placed.gpus for placed in plan.actors.values()) == [(0,), (1,)]
    with pytest.raises(DoesNotFit):
        place(large, hosts, "node00", share_gpus=True)


def test_named_gpus_are_the_head_s_and_may_have_several_actors() -> None:
    named = [Need(f"b-{n}", "policies.b.instances=3", on_head=True, named=(1,)) for n in range(3)]
    plan = place([*instances(2), *named], [host("a", 1), host("head", 2)], "head")
    assert [plan.actors[f"b-{n}"].gpus for n in range(3)] == [(1,)] * 3
    assert all(plan.actors[f"b-{n}"].sees_all for n in range(3))
    assert [(plan.actors[f"a-{n}"].node, plan.actors[f"a-{n}"].gpus) for n in range(2)] == [
        ("a", (0,)),
        ("head", (0,)),
    ]


def test_parts_of_gpus_are_for_actors_with_one() -> None:
    whole = host("node00", 1)
    parts = tuple(Gpu(f"MIG-{n}", 1, "H100 MIG", 40 * GIB, 40 * GIB) for n in range(2))
    divided = replace(whole, gpus=(*whole.gpus, *parts))
    assert fits(instances(3), [divided])
    assert fits(instances(1, 2), [divided]) is None


def test_more_large_instances_than_a_recursion_is_deep() -> None:
    hosts = [host(f"node{n:02}", 8) for n in range(300)]
    assert fits(instances(1200, 2), hosts)
