"""The only reader of os.environ: what the surroundings say, and what spawned processes are given."""

import os
import sys
import sysconfig
from pathlib import Path

# One thread per process: with two and any other busy process on the machine, throughput of small models falls
# five- to tenfold.
_THREADS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONUNBUFFERED": "1"}


def actor_environment() -> dict[str, str]:
    """The environment of actor processes: this one's, with our defaults where it says nothing."""
    return {**_THREADS, **_QUIET, **os.environ}


def runtime_base() -> Path:
    """Where a run's private directory of sockets and shared memory is made: memory-backed where there is such."""
    shared_memory = Path("/dev/shm")
    if shared_memory.is_dir() and os.access(shared_memory, os.W_OK):
        return shared_memory
    return Path(os.environ.get("TMPDIR", "/tmp"))


def describe_machine() -> dict[str, str | int]:
    """For the run's first event."""
    return {
        "python": sys.version.split()[0],
        "platform": sysconfig.get_platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "pid": os.getpid(),
    }
