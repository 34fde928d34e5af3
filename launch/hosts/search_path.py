"""Keeps Python from importing what lies in the working directory. It imports nothing but ``os`` and ``sys``: any other
module might be a file of that directory."""

import os
import sys


def leave_working_directory() -> None:
    """Takes the working directory out of ``sys.path``: a file ``msgpack.py`` in it does not belong to a run.

    ``python -m`` has put it first, and so does an empty entry of ``PYTHONPATH``, as in
    ``PYTHONPATH=$PYTHONPATH:/code`` if there was none before. It stays if flexmarl itself is imported from there."""
    workdir = os.getcwd()  # noqa: PTH109  # pathlib might be a file of the working directory
    package = os.path.abspath(__file__ + 4 * "/..")  # noqa: PTH100
    if package != workdir:
        sys.path[:] = [entry for entry in sys.path if entry not in ("", workdir)]


def without_working_directory(paths: str) -> str:
    """A value of ``PYTHONPATH`` without its empty entries, which mean the working directory."""
    return os.pathsep.join(entry for entry in paths.split(os.pathsep) if entry)
