"""Describes the machine of a measurement: its load before the first round, the versions of the libraries."""

import asyncio
import importlib.metadata
from typing import Any

import psutil
import zmq

from ..hosts import env

_BUSY_WINDOW_S = 0.5


async def describe() -> dict[str, Any]:
    """``busy_percent``: load of all cores by other programs."""
    psutil.cpu_percent()
    await asyncio.sleep(_BUSY_WINDOW_S)
    return {**env.describe_machine(), "busy_percent": psutil.cpu_percent()}


def versions() -> dict[str, str]:
    packages = ("flexmarl", "pyzmq", "msgpack", "uvloop", "numpy", "pydantic")
    by_package = {package: importlib.metadata.version(package) for package in packages}
    return {**by_package, "libzmq": zmq.zmq_version()}
