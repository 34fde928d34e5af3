"""Measures other actor libraries by the same loops, each in a process of its own:
``python -m flexmarl.launch.bench.other_frameworks``.

They have threads, daemons and output of their own, which must not reach the measurement of flexmarl or its JSON. The
standard output of this process is the result, one JSON object, and nothing else.
"""

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import uvloop

from .measure import calls_in_flight, one_after_another, percentile

INSTALL = "pip install flexmarl[bench]"

_TIMEOUT_S = 120.0
_STOP_GRACE_S = 5.0
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

Spawned = tuple[Callable[[], Awaitable[object]], Callable[[], Awaitable[object]]]

# --------------------------------------------------------------------------- the measuring process


async def measure(
    library: str, seconds: float, in_flight: int, environment: Mapping[str, str]
) -> dict[str, Any] | None:
    """The figures of ``library``; None if it is not installed, ``{"error": ...}`` if it does not work here."""
    if importlib.util.find_spec(library) is None:
        return None
    # Files, not pipes: a daemon that a library leaves running would hold a pipe open.
    with (
        tempfile.TemporaryDirectory(prefix="flexmarl-") as directory,
        (Path(directory) / "out").open("w+b") as output,
        (Path(directory) / "err").open("w+b") as errors,
    ):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "flexmarl.launch.bench.other_frameworks",
            library, str(seconds), str(in_flight), directory,
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=errors,
            env={**environment, **_QUIET}, start_new_session=True,
        )  # fmt: skip
        try:
            status = await asyncio.wait_for(process.wait(), _TIMEOUT_S)
        except TimeoutError:
            return {"error": f"did not end within {_TIMEOUT_S:g} s"}
        finally:
            await _end(process)
        if status != 0:
            return {"error": _last_line(errors) or f"exit status {status}"}
        output.seek(0)
        figures: dict[str, Any] = json.load(output)
        return figures


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends the process and its descendants: by SIGTERM first, because a library may have daemons to stop."""
    if process.returncode is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_GRACE_S)
        for relative in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                relative.kill()
        process.kill()
    await process.wait()


def _last_line(stream: BinaryIO) -> str:
    stream.seek(0)
    lines = stream.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


# --------------------------------------------------------------------------- the measured process


async def _ray(directory: str) -> Spawned:
    """An async actor with concurrent calls, as in Ray's documentation for asyncio callers."""
    import ray

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80 * 2**20,
        _temp_dir=directory,
    )

    class Echo:
        async def empty(self) -> None: ...

    echo = ray.remote(Echo).options(max_concurrency=1000).remote()

    async def stop() -> None:
        ray.shutdown()

    return lambda: echo.empty.remote(), stop


async def _xoscar(directory: str) -> Spawned:
    """An actor in a sub-pool, which is another process."""
    import xoscar

    class Echo(xoscar.Actor):  # type: ignore[misc]  # xoscar has no types
        async def empty(self) -> None: ...

    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1)
    await pool.start()
    echo = await xoscar.create_actor(
        Echo,
        address=pool.external_address,
        uid="echo",
        allocate_strategy=xoscar.allocate_strategy.ProcessIndex(1),
    )
    return lambda: echo.empty(), pool.stop


_LIBRARIES = {"ray": _ray, "xoscar": _xoscar}


async def _measure_here(library: str, seconds: float, in_flight: int, directory: str) -> dict[str, Any]:
    start = time.perf_counter()
    call, stop = await _LIBRARIES[library](directory)
    try:
        await call()
        first_reply_s = time.perf_counter() - start
        await one_after_another(call, seconds / 2)  # warm
        latencies = await one_after_another(call, seconds)
        await calls_in_flight(call, seconds / 2, in_flight)
        count, elapsed_s = await calls_in_flight(call, seconds, in_flight)
    finally:
        await stop()
    return {
        "version": importlib.metadata.version(library),
        "call_p50_us": percentile(latencies, 0.5),
        "call_p99_us": percentile(latencies, 0.99),
        "calls_per_s": count / elapsed_s,
        "start_first_reply_s": first_reply_s,
    }


def main() -> None:
    library, seconds, in_flight, directory = sys.argv[1:]
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of the library
    figures = uvloop.run(_measure_here(library, float(seconds), int(in_flight), directory))
    json.dump(figures, result)
    result.close()


if __name__ == "__main__":
    main()
