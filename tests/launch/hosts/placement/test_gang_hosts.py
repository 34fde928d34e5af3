"""Ranks on several hosts are refused before the start if their hosts, or the network between these, do not allow it."""

from dataclasses import replace

import pytest

from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.hosts.host_description import Gpu, HostDescription
from flexmarl.launch.hosts.placement.plan import DoesNotFit
from flexmarl.launch.hosts.placement.run_placement import place_run

from .hosts import GIB, host

TRUSTED = "network.bulk=trusted"
GANG = ("agents.sorter.trainer.ranks=6", "pool={name: shared, slots: 6}", "hosts.spread=true")


def config(*overrides: str) -> RunConfig:
    return resolve("sort-digits", ["agent_defaults.model.device=cuda", *overrides])


def slot_hosts(config: RunConfig, *hosts: HostDescription) -> list[str]:
    plan = place_run(config, hosts).plan
    return [placed.node for actor, placed in plan.actors.items() if actor.startswith("slot-")]


def refusal(config: RunConfig, *hosts: HostDescription) -> str:
    with pytest.raises(DoesNotFit) as refused:
        place_run(config, hosts)
    (problem,) = refused.value.problems
    return problem


def test_a_gang_that_no_host_has_room_for_lies_on_several() -> None:
    found = slot_hosts(config(*GANG, TRUSTED), host("a", 4), host("b", 4))
    assert len(found) == 6 and set(found) == {"a", "b"}
    assert set(slot_hosts(config(*GANG, TRUSTED), host("a", 8), host("b", 8))) == {"a"}


def test_without_gpus_ranks_are_where_the_cores_are() -> None:
    on_cpus = config(*GANG, TRUSTED, "agent_defaults.model.device=cpu")
    assert set(slot_hosts(on_cpus, host("a", cores=4), host("b", cores=4))) == {"a", "b"}


def test_a_network_that_is_not_trusted_is_refused_with_the_key() -> None:
    hosts = host("a", 4), host("b", 4)
    said = refusal(config(*GANG), *hosts)
    assert said.startswith(
        "the ranks of policy sorter lie on several hosts, and a process group is not encrypted"
    )
    assert said.endswith(
        "write network.bulk=trusted if all machines of that network are, else hosts.spread=false"
    )
    place_run(config(*GANG), [host("a", 8), host("b", 8)])
    place_run(config(GANG[1], GANG[2], "pool.slots=2"), hosts)
    place_run(config(*GANG, "agent_defaults={engine: {name: simulated}, trainer: {name: simulated}}"), hosts)


def test_a_driver_too_old_for_pytorch_is_refused_on_any_host_that_has_actors_on_gpus() -> None:
    old = replace(host("b", 2), cuda="13.0", driver="570.86.10")
    head = replace(host("a", 1), cuda="13.0", driver="580.1")
    said = refusal(config("agents.checker.instances=2"), head, old)
    assert said.startswith("PyTorch can't use the GPUs of b: it is built for CUDA 13.0")
    assert "needs the driver 580 or later, and 570.86.10 is installed; install a newer driver, or" in said
    place_run(config("agent_defaults.model.device=cpu"), [head, old])


def test_other_drivers_are_refused_with_their_versions() -> None:
    hosts = replace(host("a", 4), driver="580.65.06"), replace(host("b", 4), driver="590.12")
    assert refusal(config(*GANG, TRUSTED), *hosts) == (
        "the ranks of policy sorter lie on several hosts, with other versions of NVIDIA's driver: 580.65.06 on a, "
        "590.12 on b; install one version on all, or write hosts.spread=false"
    )
    place_run(config(*GANG, TRUSTED), [replace(each, driver="590.12") for each in hosts])
    place_run(config(*GANG, TRUSTED, "agent_defaults.model.device=cpu"), hosts)


def hybrid(ranks: int) -> tuple[str, ...]:
    """Two replicas."""
    trainer = "agents.sorter.trainer"
    pool = f"pool={{name: shared, slots: {ranks}}}"
    return f"{trainer}.ranks={ranks}", f"{trainer}.replicas=2", pool, "hosts.spread=true", TRUSTED


def test_the_slots_of_a_replica_are_on_one_host() -> None:
    assert slot_hosts(config(*hybrid(4)), host("a", 3), host("b", 3)) == ["a", "a", "b", "b"]
    on_cpus = config(*hybrid(4), "agent_defaults.model.device=cpu")
    first, second, third, fourth = slot_hosts(on_cpus, host("a", cores=4), host("b", cores=4))
    assert (first, third) == (second, fourth)


def test_replicas_that_the_hosts_would_divide_are_refused_with_the_slots_of_each() -> None:
    said = refusal(config(*hybrid(6)), host("a", 4), host("b", 2), host("c", 2))
    assert said.startswith(
        "policies.sorter.trainer.replicas=2: the 3 ranks of a replica lie on one host, and the 6 "
    )
    assert "do not divide so: " in said and " on a, " in said
    assert said.endswith("until each host has whole replicas, or write replicas=1")
    place_run(config(*hybrid(6)), [host("a", 4), host("b", 4)])


def test_ranks_on_parts_of_one_gpu_are_refused() -> None:
    def divided(*indices: int) -> HostDescription:
        parts = tuple(
            Gpu(f"MIG-{n}", index, "H100 MIG", 40 * GIB, 40 * GIB) for n, index in enumerate(indices)
        )
        return replace(host("a"), gpus=parts)

    pool = "pool={name: shared, slots: 2}"
    gang = config("agents.sorter.trainer.ranks=2", pool)
    assert refusal(gang, divided(3, 3)) == (
        "policies.sorter.trainer.ranks: 2 slots are parts (MIG) of GPU 3 of a: NCCL joins no two parts of one GPU; "
        "write ranks=1, or show the run one part of each GPU (CUDA_VISIBLE_DEVICES)"
    )
    assert slot_hosts(gang, divided(3, 4)) == ["a", "a"]
    assert slot_hosts(config(pool), divided(3, 3)) == ["a", "a"], "a policy for each slot"
