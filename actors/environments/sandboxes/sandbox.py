"""Commands of a workflow in a sandbox: in a folder of their own, on this host or behind a server.

    workflow ── run_in_sandbox(command, files) ─> the worker's Sandbox ─┬─> LocalSandbox: a process of the worker's pool
                                                                        └─> RexSandbox: a server over HTTP

A sandbox is one file beside this one, and its settings in ``sandbox_config.py``.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

from ...errors import SandboxFailed

KEPT_CHARACTERS: Final = 64 << 10
"""The most of each stream of a command, its end."""
ComputeInProcess = Callable[[Callable[..., Any], Sequence[Any], float], Awaitable[Any]]
"""As ``Pool.run``."""
_NO_FILES: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The end of a command. ``status``: of its exit; minus the number of a signal that has killed it. ``stdout``,
    ``stderr``: the last 64 KiB of each."""

    status: int
    stdout: str
    stderr: str


class Sandbox(Protocol):
    """Computes commands for the trajectories of a rollout worker, several at once."""

    async def run(self, command: Sequence[str], files: Mapping[str, str], timeout_s: float) -> SandboxResult:
        """See ``run_in_sandbox``."""

    async def close(self) -> None:
        """Ends what it has open."""


current_sandbox: ContextVar[Sandbox | None] = ContextVar("current_sandbox", default=None)
"""The sandbox of the worker whose workflow runs."""


async def run_in_sandbox(
    command: Sequence[str], *, files: Mapping[str, str] = _NO_FILES, timeout_s: float = 60.0
) -> SandboxResult:
    """Runs a command in a new folder, which has ``files`` and is removed afterwards: in the sandbox that the config
    names (``rollout.sandbox``).

    ``command``: the program and its arguments. ``files``: texts by name in the folder. ``timeout_s``: of the command,
    from the time on at which there is a place for it.

    Raises TimeoutError after ``timeout_s``, when the command was killed; SandboxFailed if it can't be run there;
    ValueError for a command or a name that no sandbox can take.
    """
    if not command or not all(isinstance(word, str) for word in command):
        raise ValueError(f"run_in_sandbox: command={command!r} must be a list of texts, the program first")
    for name in files:
        if not name or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"run_in_sandbox: {name!r} is not the name of a file in the command's folder")
    if timeout_s <= 0:
        raise ValueError(f"run_in_sandbox: timeout_s={timeout_s!r} must be positive")
    sandbox = current_sandbox.get()
    if sandbox is None:
        raise SandboxFailed("none", "there is no sandbox outside of a rollout worker")
    return await sandbox.run(command, files, timeout_s)


def overran(command: Sequence[str], timeout_s: float) -> TimeoutError:
    """The error of a command that was killed after ``timeout_s``."""
    return TimeoutError(f"{command[0]} took longer than timeout_s={timeout_s:g} in its sandbox")
