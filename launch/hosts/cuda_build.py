"""The version of CUDA that PyTorch is built for, found without importing it, and the drivers that can run it."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_LEAST_DRIVERS: Final = {"11": 450, "12": 525, "13": 580}
"""By the first number of CUDA's version: the CUDA toolkit's release notes, table 2."""

_CUDA: Final = re.compile(r"^cuda\b.*?= *['\"]([\d.]+)['\"]", re.MULTILINE)


def cuda_of_torch() -> str:
    """The version that the installed PyTorch is built for; empty if it is built without CUDA, or is not there."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        return cuda_in((Path(spec.origin).parent / "version.py").read_text())
    except OSError:
        return ""


def cuda_in(text: str) -> str:
    """The version in PyTorch's ``version.py``; empty if it has none."""
    match = _CUDA.search(text)
    return match[1] if match else ""


def driver_problem(cuda: str, driver: str) -> str:
    """The reason why NVIDIA's ``driver`` does not run a PyTorch that is built for ``cuda``; empty if it does, or if one
    of the two versions is unknown (empty)."""
    least = _LEAST_DRIVERS.get(cuda.partition(".")[0])
    if driver and least and int(driver.partition(".")[0]) < least:
        return (
            f"it is built for CUDA {cuda}, which needs the driver {least} or later, and {driver} is installed; install "
            "a newer driver, or a PyTorch that is built for an older CUDA (https://pytorch.org/get-started)"
        )
    return ""
