"""Sandboxes behind servers of SWE-ReX (https://swe-rex.com), over HTTP: ``swerex-remote --auth-token KEY``.

A server of SWE-ReX 1.4 computes one request at a time and hears nothing meanwhile, so that a command of ``/execute``
can't be ended by another request. So ``rex_runner.py``, which each request brings along, runs it in the background:

    begin ─> is it at its end? ─> pause ─> look ─> pause ─> look ─> its end or a cancelled call ─> end

A worker asks each server for one command at a time. The contract is that of ``/execute``, ``/write_file``,
and status 511 with the server's error. Nothing of its package is imported here.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx2

from ...errors import SandboxFailed
from .sandbox import KEPT_CHARACTERS, SandboxResult, overran

_SLACK_S: Final = 10.0
_FILE_S: Final = 30.0
_BEGIN_S: Final = 0.1
"""The longest for which a server waits for the end of a command that it has begun before it hears the next request."""
_PAUSES_S: Final = (0.2, 2.0)
_LATE: Final = 0.1
# A shell that prints a file starts in a tenth of the time of the runner.
_LOOK: Final = 'if [ -e "$0" ]; then cat "$0"; else echo "{}"; fi'
_RUNNER: Final = Path(__file__).with_name("rex_runner.py").read_text()
_FAILED: Final = 511
"""The status with which a server reports an error of its own."""
_SHOWN: Final = 200


class RexSandbox:
    """Opens no connection before the first command."""

    def __init__(self, urls: Iterable[str], key: str, retries: int, queue_timeout_s: float) -> None:
        self._retries, self._queue_timeout_s = retries, queue_timeout_s
        # A connection that is kept may be closed by the server just when it is used again: that would look like a loss.
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._client = httpx2.AsyncClient(headers={"X-API-Key": key}, limits=limits)
        self._free: asyncio.Queue[str] = asyncio.Queue()
        self._urls = [url.rstrip("/") for url in urls]
        for url in self._urls:
            self._free.put_nowait(url)

    async def run(self, command: Sequence[str], files: Mapping[str, str], timeout_s: float) -> SandboxResult:
        """See ``run_in_sandbox``."""
        problem = ""
        for _ in range(self._retries + 1):
            url = await self._server()
            try:
                return await self._run_at(url, command, files, timeout_s)
            except (httpx2.TransportError, httpx2.InvalidURL) as error:
                problem = f"{url} can't be reached: {type(error).__name__}: {error}"
            finally:
                self._free.put_nowait(url)
        raise SandboxFailed("rex", f"{problem}; tried {self._retries + 1} times")

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def _server(self) -> str:
        """Raises TimeoutError if none is free in time."""
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                return await self._free.get()
        except TimeoutError:
            raise TimeoutError(
                f"no sandbox server was free within rollout.sandbox.queue_timeout_s={self._queue_timeout_s:g}: each "
                f"of {len(self._urls)} computes one command"
            ) from None

    async def _run_at(
        self, url: str, command: Sequence[str], files: Mapping[str, str], timeout_s: float
    ) -> SandboxResult:
        """Raises TransportError if the server goes away."""
        folder = (await self._execute(url, ["mktemp", "-d"])).strip()
        if not folder.startswith("/"):
            raise SandboxFailed("rex", f"{url} makes no folder: {folder!r}")
        try:
            for name, text in files.items():
                path = f"{folder}/files/{name}"
                await self._ask(url, "write_file", {"path": path, "content": text}, _FILE_S)
            loop = asyncio.get_running_loop()
            began = loop.time()
            end = await self._runner(url, "begin", folder, str(timeout_s), str(_BEGIN_S), *command)
            while not end:
                # Here and not at the server: what it waits for a command, the other workers' requests wait for it.
                await asyncio.sleep(pause_s(loop.time() - began))
                end = await self._object(url, ["sh", "-c", _LOOK, f"{folder}/end"])
        finally:
            with contextlib.suppress(httpx2.TransportError, SandboxFailed):
                await self._runner(url, "end", folder)
        return _result(url, command, timeout_s, end)

    async def _runner(self, url: str, *words: str) -> dict[str, Any]:
        """The answer of the runner. Raises TransportError, SandboxFailed."""
        return await self._object(url, ["python3", "-I", "-c", _RUNNER, *words])

    async def _object(self, url: str, command: Sequence[str]) -> dict[str, Any]:
        """The object that a command prints. Raises TransportError, SandboxFailed."""
        printed = await self._execute(url, command)
        try:
            answer = json.loads(printed)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise SandboxFailed("rex", f"{url}: {command[0]} prints {printed[:_SHOWN]!r}, not an object")
        return answer

    async def _execute(self, url: str, command: Sequence[str]) -> str:
        """Runs a command that ends soon; returns its output. Raises TransportError, SandboxFailed."""
        body = {"command": [*command], "timeout": _FILE_S, "cwd": "/"}
        done = await self._ask(url, "execute", body, _FILE_S + _SLACK_S)
        if done.get("exit_code") != 0:
            problem = done.get("stderr") or f"it ends with {done.get('exit_code')!r}"
            raise SandboxFailed("rex", f"{url}: {command[0]}: {str(problem)[-_SHOWN:]}")
        return str(done.get("stdout", ""))

    async def _ask(self, url: str, endpoint: str, body: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The object of the answer. Raises TransportError, SandboxFailed."""
        response = await self._client.post(f"{url}/{endpoint}", json=body, timeout=limit_s)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status_code == _FAILED and isinstance(answer, dict):
            error = answer.get("swerexception")
            error = error if isinstance(error, dict) else {}
            raise SandboxFailed("rex", f"{url}/{endpoint}: {str(error.get('message', answer))[:_SHOWN]}")
        if response.status_code != 200 or not isinstance(answer, dict):
            raise SandboxFailed(
                "rex",
                f"{url}/{endpoint} answers with status {response.status_code}: {response.text[:_SHOWN]}",
            )
        return answer


def pause_s(elapsed_s: float) -> float:
    """Seconds until the next look for the end of a command that has run for ``elapsed_s``: a tenth of them, so that the
    end is seen late by little, and a long command costs its server few looks."""
    shortest, longest = _PAUSES_S
    return min(max(shortest, _LATE * elapsed_s), longest)


def _result(url: str, command: Sequence[str], timeout_s: float, end: Mapping[str, Any]) -> SandboxResult:
    """The end of a command as its runner has written it. Raises TimeoutError, SandboxFailed."""
    if end.get("overran"):
        raise overran(command, timeout_s)
    status = end.get("status")
    if not isinstance(status, int):
        raise SandboxFailed("rex", f"{url}: {str(end.get('problem', end))[:_SHOWN]}")
    return SandboxResult(
        status, *(str(end.get(stream, ""))[-KEPT_CHARACTERS:] for stream in ("stdout", "stderr"))
    )
