"""Finds the modules whose import starts threads or opens devices, in a process of its own."""

import contextlib
import importlib
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

# The module of the interpreter that imports others: it has no public hook behind an import.
_BOOTSTRAP: Final[Any] = sys.modules["_frozen_importlib"]


def main(modules: list[str]) -> None:
    """Imports the modules. Prints the seconds, and for each module that has left more threads or devices than there
    were, its name with theirs. The innermost import is named."""
    listed = [*_threads(), *_devices()]
    causes: list[tuple[str, list[str]]] = []
    loading: list[str] = []
    load = _BOOTSTRAP._load_unlocked

    def look() -> None:
        present = [*_threads(), *_devices()]
        if additions := list((Counter(present) - Counter(listed)).elements()):
            causes.append((loading[-1] if loading else "none", additions))
        listed[:] = present

    def load_and_look(spec: Any) -> Any:
        look()  # an extension may import others after the libraries behind it have started threads
        loading.append(spec.name)
        try:
            return load(spec)
        finally:
            look()
            loading.pop()

    # The function behind every import that is not done already, of a file, of an extension and of a frozen module.
    _BOOTSTRAP._load_unlocked = load_and_look
    began = time.perf_counter()
    for name in modules:
        importlib.import_module(name)
    json.dump({"seconds": time.perf_counter() - began, "causes": causes}, sys.stdout)


def _threads() -> list[str]:
    """The names of the threads: Python's where it knows them, else the kernel's."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    threads = []
    for task in sorted(Path("/proc/self/task").iterdir()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            threads.append(f"thread {names.get(task.name) or (task / 'comm').read_text().strip()}")
    return threads


def _devices() -> list[str]:
    devices = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it is the one that lists them, or has just been closed
            devices.append(str(link.readlink()))
    return [device for device in devices if device.startswith("/dev/nvidia")]
