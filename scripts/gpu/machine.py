"""The machine has all that a run on its card needs: driver, libraries, shared memory, compiler.

Recorded for the other tests' results: versions, MIG, the limit of pinned memory, the file system of shared memory.
"""

import ctypes
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from flexmarl.launch.hosts import env
from flexmarl.launch.hosts.host_description import version

from .checks import Card, Check, at_least, holds

_LEAST_SHARED_BYTES = 1 << 30


def run(card: Card) -> Iterator[Check]:
    yield Check("python", f"{platform.python_version()} ({platform.platform()})")
    yield Check("cores", len(os.sched_getaffinity(0)))
    yield from _shared_memory(env.runtime_base())
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Check("pinned memory limit", "no limit" if locked == resource.RLIM_INFINITY else locked, "bytes")
    for program in ("gcc", "nvcc"):
        yield Check(program, shutil.which(program) or "not found")
    yield from _packages(card)
    if card.is_cuda:
        yield from _driver()
        yield from _cuda(card)


def _shared_memory(base: Path) -> Iterator[Check]:
    file_system = os.statvfs(base)
    free = file_system.f_bavail * file_system.f_frsize
    yield at_least("shared memory free", free, _LEAST_SHARED_BYTES, "bytes")
    # A compiled kernel that a library stores there could not be loaded.
    no_programs = bool(file_system.f_flag & os.ST_NOEXEC)
    yield Check("shared memory noexec", f"{'yes' if no_programs else 'no'} ({base})")


def _packages(card: Card) -> Iterator[Check]:
    import torch
    import transformers

    cuda = torch.version.cuda
    yield holds("torch", torch.__version__, "a CUDA build for a card", bool(cuda) or not card.is_cuda)
    yield Check("transformers", transformers.__version__)
    for name in ("triton", "peft", "nvidia-ml-py", "vllm"):
        yield Check(name, version(name) or "not installed")


def _driver() -> Iterator[Check]:
    fields = "name,driver_version,memory.total,mig.mode.current,pcie.link.gen.current,pcie.link.width.current"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        text = str(error)
    for number, line in enumerate(text.strip().splitlines()):
        yield Check(f"card {number}", line)


def _cuda(card: Card) -> Iterator[Check]:
    import torch

    properties = torch.cuda.get_device_properties(card.device)
    yield Check(
        "device",
        f"{properties.name}, {properties.total_memory} bytes, sm_{properties.major}{properties.minor}",
    )
    yield Check("NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    name = f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        ctypes.CDLL(name)
    except OSError as error:
        yield holds(name, str(error), "the loader finds PyTorch's copy by its name", False)
    else:
        yield holds(name, "loaded", "the loader finds PyTorch's copy by its name", True)
