"""The compiler that torch.compile needs on a GPU, looked for without torch and without a GPU."""

import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from . import env


def missing_for_compilation() -> str:
    """The reason why Triton can't compile here, found without compiling anything; empty if none is found."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    # As Triton looks for it (triton.runtime.build).
    if not env.c_compiler() and not shutil.which("gcc") and not shutil.which("clang"):
        return "there is no C compiler (gcc, clang, or one named by CC)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"Python's headers are missing ({header})"
