"""Runs that don't fit are refused with the numbers that are needed and there, the users of GPUs, and the keys."""

from dataclasses import replace

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.hosts.host_description import HostDescription
from flexmarl.launch.hosts.placement.place import place
from flexmarl.launch.hosts.placement.plan import DoesNotFit, Need
from flexmarl.launch.hosts.placement.run_placement import made_up_hosts

from .hosts import GIB, host, instances, slots, trainer


def refusal(needs: list[Need], *hosts: HostDescription) -> str:
    with pytest.raises(DoesNotFit) as refused:
        place(needs, hosts, hosts[0].name)
    (problem,) = refused.value.problems
    return problem


def test_too_few_gpus_for_instances() -> None:
    assert refusal([*instances(2, 2), *instances(1, policy="b")], host("n1", 3), host("n2", 1)) == (
        "the instances need 5 GPUs (policies.a.instances=2 with 2 for each, policies.b.instances=1), and there are 4: "
        "3 on n1, 1 on n2; take fewer instances, or model.device=cuda:0, on which all instances of a policy compute "
        "together"
    )


def test_too_few_gpus_for_slots() -> None:
    assert refusal([trainer(), *slots(4)], host("n1", 3)) == (
        "training needs 4 GPUs (pool.slots=4), and there are 3: 3 on n1; take fewer trainer.ranks and pool.slots"
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_too_few_gpus_of_the_head_for_slots_that_have_to_be_there(ranks: int) -> None:
    on_head = [replace(need, on_head=True) for need in slots(4, ranks)]
    assert refusal(on_head, host("n1", 3), host("n2", 8)) == (
        "pool.slots=4: 4 GPUs are needed on the head (slots are there without hosts.spread), and n1 has 3; write "
        "hosts.spread=true, or start the run on a host with 4"
    )


def test_a_trainer_is_on_the_head() -> None:
    said = refusal([trainer(1)], host("n1", 0), host("n2", 8))
    assert "1 GPUs are needed on the head (the trainer is there), and n1 has 0; start the run on" in said


def test_the_reason_why_there_are_no_gpus() -> None:
    note = "CUDA_VISIBLE_DEVICES='' shows 0 of the 8 GPUs"
    assert f"and there are 0: 0 on n1 ({note});" in refusal(instances(1), host("n1", 0, note=note))


def test_hosts_without_gpus_are_refused_with_what_helps_there() -> None:
    assert refusal([trainer(), *slots(4)], host("n1", 0)).endswith(
        "and there are 0: 0 on n1; write model.device=cpu, or plan hosts with GPUs by `flexmarl train RECIPE --on "
        "1x8x80GiB`"
    )


def test_parts_of_a_gpu_are_no_gpus_of_an_instance_with_several() -> None:
    whole = host("n1", 4)
    parts = replace(whole, gpus=tuple(replace(gpu, uuid=f"MIG-{gpu.index}") for gpu in whole.gpus))
    assert refusal(instances(1, 2), parts) == (
        "policies.a.instances=1: an instance needs 2 GPUs of one host (engine.tensor_parallel), and the most are 0, on "
        "n1; parts of GPUs (MIG) do not count: write engine.tensor_parallel=1"
    )


def test_an_instance_is_within_one_host() -> None:
    assert refusal(instances(1, 4), host("n1", 3), host("n2", 2)) == (
        "policies.a.instances=1: an instance needs 4 GPUs of one host (engine.tensor_parallel), and the most are 3, on "
        "n1"
    )


def test_a_gpu_that_others_use_is_refused_with_its_users() -> None:
    said = refusal(instances(2), host("n1", 2, used=(1,)))
    assert "need 2 GPUs (policies.a.instances=2), and there are 1: 1 on n1;" in said
    assert said.endswith(
        "; GPU 1 (GPU-n1-1) of n1 is used by process 4711 python of ada, 30.0 GiB, and 50.0 GiB of it are free: "
        "hosts.share_gpus=true takes it all the same"
    )
    named = Need("a-0", "policies.a.model.device='cuda:1'", on_head=True, named=(1,))
    assert refusal([named], host("n1", 2, used=(1,))).startswith(
        "policies.a.model.device='cuda:1': GPU 1 (GPU-n1-1) of n1 is used by process 4711 python of ada"
    )


def test_a_named_gpu_that_is_missing() -> None:
    named = Need("a-0", "policies.a.model.device='cuda:2'", on_head=True, named=(2,))
    assert refusal([named], host("n1", 2), host("n2", 8)) == (
        "policies.a.model.device='cuda:2': GPU 2 is needed, counted from 0, and 2 are shown on n1"
    )


def test_too_little_memory_of_a_gpu() -> None:
    assert refusal(instances(1, gpu_bytes=90 * GIB), host("n1", 1)) == (
        "policies.a.instances=1: 90.0 GiB are needed on each GPU, and the most are 80.0 GiB, on n1; a smaller "
        "engine.kv_cache_bytes, or more GPUs by engine.tensor_parallel"
    )
    together = [
        Need(f"a-{n}", "policies.a.instances=3", on_head=True, named=(0,), gpu_bytes=30 * GIB)
        for n in range(3)
    ]
    assert refusal(together, host("n1", 1)) == (
        "policies.a.instances=3: 90.0 GiB are needed on GPU 0 of n1, which has 80.0 GiB; take fewer instances, or a "
        "smaller engine.kv_cache_bytes"
    )


def test_too_little_memory_of_the_hosts() -> None:
    needs = [Need(f"a-{n}", "policies.a.instances=3", memory_bytes=50 * GIB) for n in range(3)]
    assert refusal(needs, host("n1")) == (
        "150.0 GiB of memory are needed (policies.a.instances=3), and the hosts have 128.0 GiB; take fewer instances, "
        "or a smaller engine.kv_cache_bytes"
    )
    slots = [Need(f"slot-{n}", "pool.slots=3", purpose="training", memory_bytes=50 * GIB) for n in range(3)]
    assert refusal(slots, host("n1")).endswith("or a smaller engine.kv_cache_bytes, or fewer slots")


def test_memory_that_one_host_must_have() -> None:
    needs = [Need("a-0", "policies.a.instances=1", memory_bytes=150 * GIB)]
    assert refusal(needs, host("n1"), host("n2")).startswith(
        "policies.a.instances=1: 150.0 GiB of memory are needed on one host, and the most are 128.0 GiB;"
    )


def test_more_instances_with_several_gpus_than_hosts_have_room_for() -> None:
    hosts = [host(f"n{n}", 8) for n in range(64)]
    assert refusal(instances(129, 3), *hosts) == (
        "policies.a.instances=129: 129 instances need 3 GPUs of one host each (engine.tensor_parallel), and the hosts "
        "have room for 128; take fewer instances"
    )


def test_sizes_for_which_no_way_was_found() -> None:
    said = refusal([*instances(2, 3), *instances(1, 2, "b")], host("n1", 4), host("n2", 4))
    assert said.startswith(
        "no way was found to place a-0 to a-1 (3 GPUs with 0.0 GiB each), b-0 (2 GPUs with 0.0 "
    )
    assert said.endswith(
        "n2: 128.0 GiB of memory, 4 GPUs of 80.0 GiB; take more GPUs, fewer instances or slots, or a smaller "
        "engine.kv_cache_bytes"
    )


def test_actors_that_fit_only_one_by_one_are_refused_with_the_gpus_that_they_take() -> None:
    trained = [replace(need, gpu_bytes=71 * GIB) for need in slots(8)]
    said = refusal([*trained, *instances(1, gpu_bytes=51 * GIB)], *made_up_hosts("1x8x80GiB"))
    assert said == (
        "no way was found to place slot-0 to slot-7 (1 GPU with 71.0 GiB each), a-0 (1 GPU with 51.0 GiB) on the "
        "hosts, which have head: 8 GPUs of 80.0 GiB: each on GPUs of its own takes 9, and there are 8; take more GPUs, "
        "fewer instances or slots, or a smaller engine.kv_cache_bytes"
    )


@pytest.mark.parametrize("words", ["1x8x0GiB", "1x8x0.0GiB", "9999x8x80GiB", "2x8x80GB", "0x8x80GiB"])
def test_machines_that_can_not_be_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=f"--on {words}: "):
        made_up_hosts(words)
