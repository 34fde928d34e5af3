"""Sandboxes behind servers of SWE-ReX (https://swe-rex.com), over HTTP: ``swerex-remote --auth-token KEY``.

A server, in a container or a machine of its own, computes one command at a time, so a worker asks each with one; a
further command waits. The contract is that of SWE-ReX 1.4: ``/execute``, ``/write_file``, and status 511 with the
server's error. Nothing of its package is imported here.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import httpx2

from ...errors import SandboxFailed
from .sandbox import KEPT_CHARACTERS, SandboxResult, overran

_SLACK_S: Final = 10.0
_FILE_S: Final = 30.0
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
        folder_end = await self._execute(url, ["mktemp", "-d"], "/", _FILE_S)
        folder = folder_end.stdout.strip()
        if folder_end.status or not folder.startswith("/"):
            raise SandboxFailed("rex", f"{url} makes no folder: {folder_end.stderr or folder_end.stdout!r}")
        try:
            for name, text in files.items():
                path = f"{folder}/{name}"
                await self._ask(url, "write_file", {"path": path, "content": text}, _FILE_S)
            return await self._execute(url, command, folder, timeout_s)
        finally:
            with contextlib.suppress(httpx2.TransportError, SandboxFailed, TimeoutError):
                await self._execute(url, ["rm", "-rf", folder], "/", _FILE_S)

    async def _execute(
        self, url: str, command: Sequence[str], folder: str, timeout_s: float
    ) -> SandboxResult:
        body = {"command": [*command], "timeout": timeout_s, "cwd": folder}
        done = await self._ask(url, "execute", body, timeout_s + _SLACK_S)
        status = done.get("exit_code")
        if not isinstance(status, int):
            raise SandboxFailed("rex", f"{url} answers without an exit_code: {done!r:.200}")
        return SandboxResult(
            status, *(str(done.get(stream, ""))[-KEPT_CHARACTERS:] for stream in ("stdout", "stderr"))
        )

    async def _ask(self, url: str, endpoint: str, body: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The object of the answer. Raises TransportError; TimeoutError for a command that was killed."""
        response = await self._client.post(f"{url}/{endpoint}", json=body, timeout=limit_s)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status_code == _FAILED and isinstance(answer, dict):
            error = answer.get("swerexception")
            error = error if isinstance(error, dict) else {}
            if str(error.get("class_path", "")).endswith("CommandTimeoutError"):
                raise overran(body["command"], body["timeout"])
            raise SandboxFailed("rex", f"{url}/{endpoint}: {str(error.get('message', answer))[:_SHOWN]}")
        if response.status_code != 200 or not isinstance(answer, dict):
            raise SandboxFailed(
                "rex",
                f"{url}/{endpoint} answers with status {response.status_code}: {response.text[:_SHOWN]}",
            )
        return answer
