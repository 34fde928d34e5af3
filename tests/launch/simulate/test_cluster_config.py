"""The section ``cluster`` of a simulated run."""

import pytest
from pydantic import ValidationError

from flexmarl.launch.simulate.cluster_config import ClusterConfig
from flexmarl.launch.simulate.devices import PRESETS

NUMBERS = {"tflops": 100, "memory_gib": 40, "memory_gb_s": 1000, "link_gb_s": 50, "host_gb_s": 16}


def test_a_device_is_named_or_given_by_its_numbers() -> None:
    named = ClusterConfig.model_validate({"hosts": 2, "devices": 8, "device": "H100"})
    assert named.device == PRESETS["H100"] and named.device_bytes == 80 * 2**30
    given = ClusterConfig.model_validate({"hosts": 1, "devices": 1, "device": NUMBERS})
    assert given.device.tflops == 100 and given.device.memory_share == PRESETS["H100"].memory_share


def test_a_device_is_another_one_with_a_few_numbers_of_its_own() -> None:
    device = {"base": "H200", "memory_gib": 120, "training_share": 0.45}
    cluster = ClusterConfig.model_validate({"hosts": 1, "devices": 1, "device": device})
    assert cluster.device == PRESETS["H200"].model_copy(update={"memory_gib": 120.0, "training_share": 0.45})
    assert ClusterConfig.model_validate(cluster.model_dump(mode="json")) == cluster


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({"base": "H2000"}, "there is no device 'H2000'; .*do you mean H200"),
        ({"base": 200}, "base is 200, not the name of a device; there are: A100, "),
        ({"base": "H200", "memory_gb": 120}, "memory_gb"),
        ({"base": "H200", "memory_gib": -1}, "memory_gib"),
    ],
)
def test_a_device_with_a_mistaken_base_or_number_is_refused(device: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ClusterConfig.model_validate({"hosts": 1, "devices": 1, "device": device})


def test_a_written_cluster_is_the_same_when_it_is_read_again() -> None:
    cluster = ClusterConfig.model_validate({"hosts": 48, "devices": 16, "device": "NPU-64GB"})
    assert ClusterConfig.model_validate(cluster.model_dump(mode="json")) == cluster


@pytest.mark.parametrize("missing", NUMBERS)
def test_a_device_without_one_of_its_numbers_is_refused_by_its_key(missing: str) -> None:
    numbers = {key: value for key, value in NUMBERS.items() if key != missing}
    with pytest.raises(ValidationError, match=f"device.{missing}\n  Field required"):
        ClusterConfig.model_validate({"hosts": 1, "devices": 1, "device": numbers})


def test_an_unknown_device_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ValidationError, match="there is no device 'H1000'; there are: A100, H100, .*do you mean H100"
    ):
        ClusterConfig.model_validate({"hosts": 1, "devices": 1, "device": "H1000"})


@pytest.mark.parametrize(("hosts", "devices"), [(1, 10**9), (10**9, 1), (65_537, 1), (8_193, 8)])
def test_a_mistyped_number_of_devices_is_refused_before_they_are_described(hosts: int, devices: int) -> None:
    with pytest.raises(ValidationError, match=f"are {hosts * devices} devices, and at most 65536 can be"):
        ClusterConfig.model_validate({"hosts": hosts, "devices": devices, "device": "H100"})
    assert ClusterConfig.model_validate({"hosts": 8_192, "devices": 8, "device": "H100"}).hosts == 8_192


def test_hosts_are_described_for_the_plan_of_a_run() -> None:
    cluster = ClusterConfig.model_validate({"hosts": 3, "devices": 4, "device": "H200"})
    hosts = cluster.descriptions()
    assert [host.name for host in hosts] == ["host-0", "host-1", "host-2"]
    gpus = [gpu for host in hosts for gpu in host.gpus]
    assert len({gpu.uuid for gpu in gpus}) == 12
    assert {(gpu.total_bytes, gpu.free_bytes) for gpu in gpus} == {(141 * 2**30, 141 * 2**30)}
