"""Devices by PyTorch's names."""

import pytest
import torch

from flexmarl.transport.device_memory import find_devices
from flexmarl.transport.errors import UnknownDevice


def test_a_cpu_has_no_memory_of_its_own() -> None:
    assert find_devices([]) is None and find_devices(["cpu", "cpu"]) is None


def test_cuda_without_a_device_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        UnknownDevice, match=r"device cuda: this process does not see it \(visible: no device\)"
    ):
        find_devices(["cpu", "cuda:1"])
