"""A sandbox of this host: commands in processes of the worker's pool. It isolates nothing but the folder."""

import shutil
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from ...errors import ProcessFailed, SandboxFailed
from .sandbox import KEPT_CHARACTERS, ComputeInProcess, SandboxResult, overran


class LocalSandbox:
    """A worker's own. ``folder``: for the files of its commands."""

    def __init__(
        self, compute: ComputeInProcess, folder: Path, run_blocking: Callable[..., Awaitable[Any]]
    ) -> None:
        self._compute, self._folder, self._run_blocking = compute, folder, run_blocking
        self._numbers = count()

    async def run(self, command: Sequence[str], files: Mapping[str, str], timeout_s: float) -> SandboxResult:
        """See ``run_in_sandbox``."""
        folder = self._folder / str(next(self._numbers))
        try:
            result: SandboxResult = await self._compute(
                run_here, [[*command], dict(files), str(folder)], timeout_s
            )
            return result
        except TimeoutError:
            raise overran(command, timeout_s) from None
        except ProcessFailed as failed:
            raise SandboxFailed("local", failed.problem) from failed
        finally:
            await self._run_blocking(partial(shutil.rmtree, folder, ignore_errors=True))

    async def close(self) -> None:
        """Does nothing: the pool is the worker's."""


def run_here(command: list[str], files: dict[str, str], folder: str) -> SandboxResult:
    """Runs a command in this process's group, which is killed if it takes too long. Raises OSError."""
    inside = Path(folder) / "files"
    inside.mkdir(parents=True)
    for name, text in files.items():
        path = inside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    streams = [Path(folder) / "stdout", Path(folder) / "stderr"]
    with streams[0].open("wb") as stdout, streams[1].open("wb") as stderr:
        done = subprocess.run(command, cwd=inside, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
    return SandboxResult(done.returncode, *(_tail(path) for path in streams))


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - KEPT_CHARACTERS))
        return file.read().decode(errors="replace")
