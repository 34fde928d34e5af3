"""The memory that an engine of vLLM needs on each of its devices, and the check that it is there before vLLM starts.

vLLM's own check asks for a share of the whole device, however much memory keys and values have: a trainer or a second
engine on the same device would make it fail (``vllm.v1.worker.utils.request_memory``). It is switched off by a share of
almost nothing (``UTILIZATION``), and this one takes its place.

The order in which the actors of a device start makes no difference here: memory that another actor holds for a moment,
or that the driver takes back from a process that was killed, is waited for, up to a deadline.
"""

import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from ....transport.nvidia_driver import computing_processes, device_handle, memory_of, session
from ....transport.state_dict import without_ties
from ...errors import NoDeviceMemory
from ...model_shape import shape_of
from ..engine_bytes import MemoryNeed, engine_bytes
from ..inference_config import VllmEngineConfig

UTILIZATION: Final = 1e-6
"""The ``gpu_memory_utilization`` that vLLM gets. With ``kv_cache_memory_bytes`` its check at the start alone reads it,
and asks for this share of the device to be free."""

MEMORY_TIMEOUT_S: Final = 60.0
"""Longest wait for memory of other processes."""

_POLL_S: Final = 0.5  # the driver has no event for memory that becomes free


@dataclass(frozen=True, slots=True)
class DeviceUser:
    """Another process that has memory of a device. ``memory_bytes``: None if the driver does not report it."""

    name: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The memory of a device. ``name``: for people. ``users``: the other processes on it that the driver reports."""

    name: str
    total_bytes: int
    free_bytes: int
    users: tuple[DeviceUser, ...] = ()


def check_memory(outline: PreTrainedModel, options: VllmEngineConfig) -> None:
    """Blocks until the devices of an engine have room for it. Raises NoDeviceMemory if they have none in time."""
    gc.collect()
    torch.cuda.empty_cache()  # memory of a former engine of this process is not free for the driver
    wait_for_memory(memory_need(outline, options), lambda: read_devices(options.tensor_parallel))


def memory_need(outline: PreTrainedModel, options: VllmEngineConfig) -> MemoryNeed:
    """The need of an engine with the model ``outline``, whose tensors may be on the device ``meta``."""
    tensors = without_ties(outline.state_dict(keep_vars=True))
    shape = shape_of({name: tuple(tensor.shape) for name, tensor in tensors.items()}, outline.config)
    return engine_bytes(shape, options, outline.dtype.itemsize)


def memory_problem(need: MemoryNeed, device: DeviceState) -> str | None:
    """The reason for which a device can't take an engine now, with the way out; None if it can."""
    if need.total_bytes <= device.free_bytes:
        return None
    most = device.free_bytes - need.weights_bytes - need.rest_bytes
    way_out = "give the policy another device (model.device=cuda), or more of them (engine.tensor_parallel)"
    if most > 0:
        way_out = f"set engine.kv_cache_bytes to at most {most}, or {way_out}"
    users = ", ".join(map(_user_text, device.users)) or "none that the driver reports"
    return (
        f"{device.name} has {_gib(device.free_bytes)} of {_gib(device.total_bytes)} GiB free, and this engine needs "
        f"{_gib(need.total_bytes)} GiB there: {_gib(need.weights_bytes)} for weights, {_gib(need.kv_cache_bytes)} for "
        f"keys and values (engine.kv_cache_bytes={need.kv_cache_bytes}), about {_gib(need.rest_bytes)} for "
        f"activations, CUDA graphs and the context. Other processes on it: {users}. Remedy: {way_out}"
    )


def _user_text(user: DeviceUser) -> str:
    return user.name if user.memory_bytes is None else f"{user.name} with {_gib(user.memory_bytes)} GiB"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}"


def wait_for_memory(
    need: MemoryNeed,
    read: Callable[[], Sequence[DeviceState]],
    *,
    timeout_s: float = MEMORY_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Blocks until each device that ``read`` returns has room. Raises NoDeviceMemory after ``timeout_s``."""
    deadline = clock() + timeout_s
    while problems := [text for device in read() if (text := memory_problem(need, device)) is not None]:
        if clock() >= deadline:
            raise NoDeviceMemory(f"{problems[0]} (waited {timeout_s:g} s for it)")
        pause(_POLL_S)


def read_devices(count: int) -> list[DeviceState]:
    """The first ``count`` CUDA devices that this process sees."""
    from vllm.utils.import_utils import import_pynvml

    return [_read_device(import_pynvml(), index) for index in range(count)]


def _read_device(nvml: Any, index: int) -> DeviceState:
    properties: Any = torch.cuda.get_device_properties(index)
    name, uuid = f"cuda:{index} ({properties.name})", str(properties.uuid).removeprefix("GPU-")
    # By NVML first: CUDA takes half a GiB for its context on every device that it is asked for.
    if (state := driver_state(nvml, name, f"GPU-{uuid}")) is not None:
        return state
    free, total = torch.cuda.mem_get_info(index)
    return DeviceState(name, total, free)


def driver_state(nvml: Any, name: str, uuid: str) -> DeviceState | None:
    """The memory of a device, or of a part of one (MIG), as the driver reports it; None without access to the driver,
    as in some containers. ``nvml``: the module of nvidia-ml-py."""
    with suppress(nvml.NVMLError), session(nvml):
        handle = device_handle(nvml, uuid)
        free, total = memory_of(nvml, handle)
        users = (
            DeviceUser(_read_name(process), size)
            for process, size in computing_processes(nvml, handle)
            if process != os.getpid()
        )
        return DeviceState(name, total, free, tuple(users))
    return None


def _read_name(process: int) -> str:
    # It may have ended meanwhile, or be a process of another container.
    with suppress(OSError):
        return process_name(process, Path(f"/proc/{process}/cmdline").read_bytes())
    return process_name(process, b"")


_ACTOR: Final = "flexmarl-actor"
_WORKER: Final = "worker_main"


def process_name(process: int, command_line: bytes) -> str:
    """A process for people: the actor in it, if it is one of flexmarl's, else its number and command. ``command_line``:
    as in ``/proc/PID/cmdline``."""
    words = command_line.decode(errors="replace").replace("\0", " ").split()
    for number, word in enumerate(words):
        # ``core.worker``: the title of a forked actor, and the arguments of one that has an interpreter of its own.
        at = number + 2 if word == _ACTOR else number + 4 if word.endswith(_WORKER) else len(words)
        if at < len(words):
            return f"the actor {words[at]} (process {process})"
    command = " ".join(words)
    return f"process {process} ({command[:60]})" if command else f"process {process}"
