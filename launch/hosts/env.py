"""Reads the environment (the only module that may) and makes the environment of actor processes."""

import os
import re
import socket
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from ...actors.errors import ConfigError
from .search_path import without_working_directory

# One thread per process: with two threads and any other busy process on the machine, the throughput of small models
# falls five- to tenfold.
_THREADS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# Otherwise glibc's allocator returns the memory of a forward and backward to the kernel, and each page of the next is
# a fault. Bytes: from the first on an allocation is mapped by itself, and up to the second free memory is kept.
_KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
_QUIET_VLLM = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONUNBUFFERED": "1",
    **_QUIET_VLLM,
}
# https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"
_TORCHRUN = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+)"
)
# A look for GPUs that opens none: processes are forked later (https://docs.pytorch.org/docs/stable/cuda_environment_variables.html).
_OPENS_NO_DEVICE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# PyArrow's second allocator would start a thread when it is imported. A process with threads is not forked: each actor
# would import everything again, which takes 12 s beside a GPU's libraries.
_STARTS_NO_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
SLOT_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
"""Variables of slot workers. By default torch's watchdog ends a process that has lost a rank of its group. With 2
the collective call raises, and the worker outlives the gang (ProcessGroupNCCL.hpp, CleanUpOnly)."""
LATE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "TMPDIR", *SLOT_VARIABLES)
"""Variables that libraries read when they are first used, not when they are imported."""
_WRITES_NOTHING = {"PYTHONDONTWRITEBYTECODE": "1"}


def actor_environment() -> dict[str, str]:
    """The environment of actor processes: this process's, and our defaults for variables that are not set.

    Without torchrun's variables, if it has started this process: an actor is not one of its ranks. Groups of processes
    that vLLM makes in an actor would wait for torchrun's server (``TORCHELASTIC_USE_AGENT_STORE``). Nor does an actor
    import what lies in the working directory."""
    of_torchrun = torchrun_variables() if "TORCHELASTIC_RUN_ID" in os.environ else {}
    variables = {name: value for name, value in os.environ.items() if name not in of_torchrun}
    if paths := variables.get("PYTHONPATH"):
        variables["PYTHONPATH"] = without_working_directory(paths)
    return {**_THREADS, **_KEPT_MEMORY, **_QUIET, **_OPENS_NO_DEVICE, **_STARTS_NO_THREAD, **variables}


def cuda_devices(uuids: Sequence[str]) -> dict[str, str]:
    """The variables of a process that sees these CUDA devices alone, in this order."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}


def visible_devices() -> str | None:
    """The CUDA devices that this process may use, as Slurm, torchrun or a person names them; None: all of them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def c_compiler() -> str:
    """The C compiler that the variable ``CC`` names; empty if it names none."""
    return os.environ.get("CC", "")


def torchrun_variables() -> dict[str, str]:
    """The variables by which torchrun describes a process that it has started."""
    return {name: value for name, value in os.environ.items() if _TORCHRUN.fullmatch(name)}


def host_name() -> str:
    """The name of this host: Slurm's, in its jobs, or else the system's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def preflight_environment(directory: Path) -> dict[str, str]:
    """The environment of the process that checks a run before its start: the actors', without files of bytecode, and
    with temporary files in ``directory``."""
    return {**actor_environment(), **_WRITES_NOTHING, "TMPDIR": str(directory)}


def cached_models_only() -> dict[str, str]:
    """The variables of a process that never asks the Hugging Face hub."""
    return {"HF_HUB_OFFLINE": "1"}


def use_vllm_in_one_process() -> None:
    """From now on vLLM, in this process and in those that it starts, begins no processes of its own and compiles
    nothing."""
    # Here: it reads all messages, which is most of a second that small commands need not wait for.
    from ...actors.inference.inference_config import VllmEngineConfig

    for name, value in (_QUIET_VLLM | VllmEngineConfig().environment("cpu")).items():
        os.environ.setdefault(name, value)


def shows_whole_tracebacks() -> bool:
    """True if the tracebacks of a recipe's errors are to have all frames: ``FLEXMARL_TRACEBACK=full``."""
    return os.environ.get("FLEXMARL_TRACEBACK") == "full"


def runtime_base() -> Path:
    """The folder for the directories of runs, with their sockets and shared memory: the variable
    ``FLEXMARL_RUNTIME_BASE``, else /dev/shm, or the folder for temporary files if /dev/shm can't be written.

    Raises ConfigError if the variable does not name a folder that can be written.
    """
    if path := os.environ.get("FLEXMARL_RUNTIME_BASE"):
        base = Path(path)
        if not base.is_dir() or not os.access(base, os.W_OK):
            problem = "it can't be written" if base.is_dir() else "there is no such folder"
            raise ConfigError(f"environment variable FLEXMARL_RUNTIME_BASE={path}: {problem}")
        return base
    shared_memory = Path("/dev/shm")
    if shared_memory.is_dir() and os.access(shared_memory, os.W_OK):
        return shared_memory
    return Path(os.environ.get("TMPDIR", "/tmp"))


class Machine(TypedDict):
    """``cpus``: those this process may use. ``pid``: this process's."""

    python: str
    platform: str
    cpus: int
    pid: int


def describe_machine() -> Machine:
    """Python's version, the platform, the usable CPUs and the process id, for the first event of a run and for
    benchmarks."""
    return {
        "python": sys.version.split()[0],
        "platform": sysconfig.get_platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "pid": os.getpid(),
    }
