"""The memory of a device is checked before vLLM starts: what is needed, what is free, who has the rest."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flexmarl.actors.errors import NoDeviceMemory
from flexmarl.actors.inference.engine_bytes import MemoryNeed
from flexmarl.actors.inference.engines.vllm_memory import (
    DeviceState,
    DeviceUser,
    driver_state,
    memory_need,
    memory_problem,
    process_name,
    wait_for_memory,
)
from flexmarl.actors.inference.inference_config import VllmEngineConfig
from flexmarl.actors.pretrained import outline_of

from .vllm_engines import model_of

GIB = 2**30
NEED = MemoryNeed(weights_bytes=3 * GIB, kv_cache_bytes=20 * GIB, rest_bytes=3 * GIB)


def device(free: int, *users: DeviceUser) -> DeviceState:
    return DeviceState("cuda:0 (NVIDIA H100)", 80 * GIB, free, users)


def test_an_engine_fits_into_exactly_what_it_needs() -> None:
    assert NEED.total_bytes == 26 * GIB
    assert memory_problem(NEED, device(26 * GIB)) is None
    assert memory_problem(NEED, device(26 * GIB - 1)) is not None


def test_the_sentence_names_every_part_the_others_and_the_way_out() -> None:
    users = (DeviceUser("the actor trainer (process 7)", 54 * GIB), DeviceUser("process 9", None))
    assert memory_problem(NEED, device(25 * GIB, *users)) == (
        "cuda:0 (NVIDIA H100) has 25.0 of 80.0 GiB free, and this engine needs 26.0 GiB there: 3.0 for weights, 20.0 "
        "for keys and values (engine.kv_cache_bytes=21474836480), about 3.0 for activations, CUDA graphs and the "
        "context. Other processes on it: the actor trainer (process 7) with 54.0 GiB, process 9. Remedy: set engine."
        "kv_cache_bytes to at most 20401094656, or give the policy another device (model.device=cuda), or more "
        "of them (engine.tensor_parallel)"
    )
    problem = memory_problem(NEED, device(5 * GIB)) or ""
    assert "none that the driver reports. Remedy: give the policy another device" in problem
    fits = MemoryNeed(3 * GIB, 20401094656, 3 * GIB)
    assert memory_problem(fits, device(25 * GIB)) is None, "what the sentence proposes fits"


def test_the_need_follows_from_the_model_and_the_options() -> None:
    model = outline_of(model_of())
    weights = sum(p.numel() for p in model.parameters()) * 4
    options = VllmEngineConfig(kv_cache_bytes=7 * GIB)
    whole = memory_need(model, options)
    assert (whole.weights_bytes, whole.kv_cache_bytes) == (weights, 7 * GIB)
    assert memory_need(model, options.model_copy(update={"tensor_parallel": 2})).weights_bytes == weights // 2
    eager = memory_need(model, options.model_copy(update={"enforce_eager": True}))
    assert eager.rest_bytes < whole.rest_bytes, "no CUDA graphs"
    tied = outline_of(model_of(tied=True))
    assert memory_need(tied, options).weights_bytes == sum(p.numel() for p in tied.parameters()) * 4
    quantized = memory_need(model, options.model_copy(update={"options": {"quantization": "fp8"}}))
    linear = sum(m.weight.numel() for n, m in model.named_modules() if n.endswith("_proj"))
    assert quantized.weights_bytes == weights - 3 * linear


class Time:
    """A clock that only ``pause`` moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds


def _waited(read: Callable[[float], list[DeviceState]], timeout_s: float = 60.0) -> float:
    time = Time()
    wait_for_memory(NEED, lambda: read(time.now), timeout_s=timeout_s, clock=time.clock, pause=time.pause)
    return time.now


def test_memory_that_another_process_has_for_a_moment_is_waited_for() -> None:
    assert _waited(lambda now: [device(80 * GIB)]) == 0
    assert 5 <= _waited(lambda now: [device(80 * GIB), device((80 if now >= 5 else 1) * GIB)]) <= 6


def test_memory_that_does_not_come_ends_the_wait_with_the_sentence() -> None:
    trainer = DeviceUser("the actor trainer (process 7)", 70 * GIB)
    with pytest.raises(
        NoDeviceMemory, match=r"has 10\.0 of 80\.0 GiB free.*actor trainer.*\(waited 9 s for it\)"
    ):
        _waited(lambda now: [device(10 * GIB, trainer)], timeout_s=9.0)


class Driver:
    """NVML with one device of 80 GiB, whose processes are this one and its parent."""

    class NVMLError(Exception):
        pass

    def __init__(self, fails: str = "") -> None:
        self._fails = fails
        self.users = 0

    def __getattr__(self, call: str) -> Any:
        def answer(*arguments: Any) -> Any:
            self.users += {"nvmlInit": 1, "nvmlShutdown": -1}.get(call, 0)
            if call == self._fails:
                raise self.NVMLError("Not Supported")
            return {
                "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GIB, free=9 * GIB),
                "nvmlDeviceGetComputeRunningProcesses": [
                    SimpleNamespace(pid=os.getpid(), usedGpuMemory=GIB),
                    SimpleNamespace(pid=os.getppid(), usedGpuMemory=70 * GIB),
                ],
            }.get(call, arguments)

        return answer


def test_the_driver_names_the_other_processes_and_is_left_again() -> None:
    driver = Driver()
    state = driver_state(driver, "cuda:0", "GPU-a")
    assert state is not None and (state.total_bytes, state.free_bytes) == (80 * GIB, 9 * GIB)
    (user,) = state.users
    assert user.memory_bytes == 70 * GIB and f"process {os.getppid()}" in user.name
    assert driver.users == 0
    driver = Driver(fails="nvmlDeviceGetComputeRunningProcesses")
    assert driver_state(driver, "cuda:0", "GPU-a") == DeviceState("cuda:0", 80 * GIB, 9 * GIB)
    driver = Driver(fails="nvmlDeviceGetHandleByUUID")
    assert driver_state(driver, "cuda:0", "MIG-a") is None and driver.users == 0


@pytest.mark.parametrize(
    ("command_line", "name"),
    [
        (b"flexmarl-actor /dev/shm/flexmarl-x solver-0\0\0\0", "the actor solver-0 (process 7)"),
        (
            b"/usr/bin/python\0-P\0-m\0flexmarl.core.worker.worker_main\x003\x00-1\0/dev/shm/flexmarl-x\0trainer\0",
            "the actor trainer (process 7)",
        ),
        (b"python\0train.py\0", "process 7 (python train.py)"),
        (b"VLLM::Worker_TP1\0\0", "process 7 (VLLM::Worker_TP1)"),
        (b"flexmarl-actor\0", "process 7 (flexmarl-actor)"),
        (b"", "process 7"),
    ],
)
def test_a_process_has_the_name_of_its_actor(command_line: bytes, name: str) -> None:
    assert process_name(7, command_line) == name
