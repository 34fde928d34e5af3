"""The devices of instances: each has its own, unless the config names one for all; too few are refused by name."""

import pytest

from flexmarl.actors.names import PolicyName
from flexmarl.launch.config_reading import resolve
from flexmarl.launch.cuda_devices import devices_of_instances, too_few_devices
from flexmarl.launch.preflight.model_checks import device_problems
from flexmarl.launch.run_config import RunConfig

SORTER, CHECKER = PolicyName("sorter"), PolicyName("checker")


def config(*overrides: str) -> RunConfig:
    """Two agents with a policy each."""
    return resolve("sort-digits", list(overrides))


def on_cuda(*overrides: str) -> RunConfig:
    return config("agent_defaults.model.device=cuda", *overrides)


def test_each_instance_has_a_device_of_its_own() -> None:
    dealt = devices_of_instances(on_cuda("agents.sorter.instances=2"))
    assert dealt == {SORTER: [(0,), (1,)], CHECKER: [(2,)]}


def test_instances_share_a_device_if_the_config_names_one() -> None:
    dealt = devices_of_instances(config("agent_defaults.model.device='cuda:0'", "agents.sorter.instances=2"))
    assert dealt == {SORTER: [(), ()], CHECKER: [()]}


def test_instances_on_cpus_have_no_device() -> None:
    assert devices_of_instances(config()) == {SORTER: [()], CHECKER: [()]}


def test_vllm_has_a_device_for_each_part_of_a_layer() -> None:
    two = "agents.sorter.engine={name: vllm, tensor_parallel: 2}"
    dealt = devices_of_instances(on_cuda(two, "agents.sorter.instances=2"))
    assert dealt == {SORTER: [(0, 1), (2, 3)], CHECKER: [(4,)]}


def test_an_instance_that_may_move_has_the_devices_for_every_policy() -> None:
    two = "agents.sorter.engine={name: vllm, tensor_parallel: 2}"
    assert devices_of_instances(on_cuda(two, "balance.scope=intra+inter"))[CHECKER] == [(2, 3)]


def test_more_instances_than_devices_are_refused_with_the_numbers_and_the_key() -> None:
    three = on_cuda("agents.sorter.instances=3")
    assert list(too_few_devices(three, 4)) == []
    (refused,) = too_few_devices(three, 3)
    assert refused[0] == CHECKER
    assert refused[1].startswith(
        "policies.checker.instances=1 needs 1 CUDA device, 1 for each, the instances of all policies need 4; "
        "PyTorch finds 3: take fewer instances, or device=cuda:0"
    )
    assert [policy for policy, _ in too_few_devices(three, 2)] == [SORTER, CHECKER]
    ((_, reason),) = too_few_devices(
        on_cuda("agents.checker.model.device=cpu", "agents.sorter.engine={name: vllm, tensor_parallel: 2}"), 1
    )
    assert (
        reason
        == "policies.sorter.instances=1 needs 2 CUDA devices, 2 for each; PyTorch finds 1: take fewer instances"
    )


def test_the_devices_that_pytorch_finds_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert list(device_problems(on_cuda())) == []
    (problem,) = device_problems(on_cuda("agents.sorter.instances=2"))
    assert (problem.policy, problem.part, problem.value) == ("checker", "device", "cuda")
    assert "the instances of all policies need 3; PyTorch finds 2" in problem.text
    shared = config("agent_defaults.model.device='cuda:0'", "agents.sorter.instances=8")
    assert list(device_problems(shared)) == []
